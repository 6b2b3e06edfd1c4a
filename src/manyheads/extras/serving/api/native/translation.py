"""Requests of our own protocol, the parts that its answers share, and `/v1/translate`: n-best lists with scores,
alignments, forced prefixes, and events by sentence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field
from torch import Tensor

from manyheads.decoding.inputs_and_results import prefix_ids
from manyheads.decoding.search_problem import BeamRules
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.extras.serving.api.shared import (
    Body,
    Ids,
    Text,
    Texts,
    body_of,
    finite,
    given,
    large_answer,
    server_event,
    translator_for,
)
from manyheads.extras.serving.glossaries import NOTE, parse_terms
from manyheads.extras.serving.jobs import MOST_MAPPED, Done, Row, ScoredIds, attention_maps, mean_map
from manyheads.extras.serving.refusals import Refusal, invalid, openai_error
from manyheads.extras.serving.texts import KeptRows, Sentence, rejoin, split

if TYPE_CHECKING:
    from manyheads.decoding.inputs_and_results import Candidate, Hypothesis
    from manyheads.extras.serving.served import ServedTranslator
    from manyheads.extras.serving.service import Service

_MOST_NGRAM = 100
"""Every n-gram of a prompt is kept, so their memory is n times that of the prompt."""


class TranslateBody(body_of(DecodingSettings, "native", Body)):  # type: ignore[misc]
    """A request for translations. Options that are not given are the model's."""

    model: Text | None = Field(None, description="Name of the model; default: the first that translates.")
    text: Text | Texts = Field(description="One text or several.")
    source_lang: Text | None = Field(None, description="Chooses the model by its languages, if no model is named.")
    target_lang: Text | None = None
    split_sentences: bool = Field(
        True, description="Translate each sentence separately; otherwise split at line breaks only."
    )
    stream: bool = Field(False, description="Send the sentences as server-sent events as they are finished.")
    alignments: bool = Field(
        False,
        description="Add the cross-attention of the best translation of each sentence, if it has at most 1,000 tokens.",
    )
    top_log_probs: int = Field(0, ge=0, le=20, description="Alternatives of each token of the best translation.")
    forced_prefix: Text | None = Field(None, description="How the translation begins; for one sentence.")
    forced_prefix_ids: Ids | None = Field(None, description="The same as token ids.")
    no_repeat_ngram_size: Annotated[int, Field(le=_MOST_NGRAM)] | None = None
    json_schema: dict[str, Any] | Text | None = Field(None, description="The output is JSON that this permits.")
    terms: Text | None = Field(
        None, description="Terms as lines of source, tab, target, which are forced in the best translations."
    )


class GenerateBody(body_of(GenerationSettings, "native", Body)):  # type: ignore[misc]
    """A request for continuations. Options that are not given are the model's."""

    model: Text | None = Field(None, description="Name of the model; default: the first language model.")
    prompt: Text | Texts = ""
    prompt_ids: Ids | None = Field(None, description="One prompt as token ids, instead of prompt.")
    stream: bool = Field(False, description="Send the text as server-sent events while it is generated.")
    top_log_probs: int = Field(0, ge=0, le=20, description="Alternatives of each token, best first.")
    stop: Texts | None = Field(None, description="Texts that end a continuation.", max_length=16)
    no_repeat_ngram_size: Annotated[int, Field(le=_MOST_NGRAM)] | None = None
    json_schema: dict[str, Any] | Text | None = Field(None, description="The output is JSON that this permits.")


class ScoreBody(Body):
    """A request for log-probabilities: of translations (source and target), or of texts."""

    model: Text | None = None
    source_lang: Text | None = Field(None, description="Of pairs: as in /v1/translate.")
    target_lang: Text | None = None
    source: Texts | None = Field(None, description="Sources; their translations are in target.")
    target: Texts | None = None
    text: Texts | None = Field(None, description="Texts for a language model.")
    top_log_probs: int = Field(0, ge=0, le=20, description="Alternatives of each token, best first.")


class AttentionBody(Body):
    """A request for the attention weights of a pair.

    If no layer or head is named, weights are averaged over all of them.
    """

    model: Text | None = None
    source_lang: Text | None = Field(None, description="Chooses the model by its languages, if no model is named.")
    target_lang: Text | None = None
    source: Text
    target: Text | None = Field(None, description="Default: the model's own translation.")
    kind: Literal["cross", "encoder", "decoder"] = "cross"
    layer: Annotated[int, Field(ge=0)] | None = None
    head: Annotated[int, Field(ge=0)] | None = None


def of_tokens(
    ids: list[int], log_probs: list[float], top: list[list[tuple[int, float]]], show: Callable[[list[int]], list[str]]
) -> dict[str, Any]:
    """Return the entries about tokens. top: alternatives of each, if they are asked for."""
    shown = {"tokens": show(ids), "token_ids": ids, "token_log_probs": [finite(value) for value in log_probs]}
    return {**shown, "top_log_probs": of_alternatives(top, show)} if top else shown


def of_alternatives(
    top: list[list[tuple[int, float]]], show: Callable[[list[int]], list[str]]
) -> list[list[dict[str, Any]]]:
    """Return the alternatives of each token, as records. show: readable tokens of ids."""
    return [
        [{"token": show([index])[0], "token_id": index, "log_prob": finite(value)} for index, value in one]
        for one in top
    ]


def rounded(weights: Tensor) -> list[list[float]]:
    """Return attention weights with four digits."""
    return [[round(value, 4) for value in row] for row in weights.tolist()]


class TranslateJob:
    """A translation in progress: its texts, their sentences, and one row of the engine for each sentence."""

    def __init__(self, service: Service, request: Request, body: TranslateBody, model: ServedTranslator) -> None:
        self._service, self._request, self._body, self._model = service, request, body, model
        self._texts = [body.text] if isinstance(body.text, str) else body.text
        self._sentences: list[tuple[int, Sentence]] = []
        self._rows: list[Row | None] = []
        self._settings: DecodingSettings

    @classmethod
    async def prepare(cls, service: Service, request: Request, body: TranslateBody) -> TranslateJob:
        """Split, tokenise and check. Raises: Refusal, RequestError, ConfigError: the request cannot be served."""
        found = cls(service, request, body, translator_for(service, body.model, body.source_lang, body.target_lang))
        service.check_count("text", len(found._texts))
        await found._encode()
        return found

    async def _encode(self) -> None:
        body, model, service = self._body, self._model, self._service

        def cut(some: list[str]) -> list[list[Sentence]]:
            check = partial(service.check_sentences, self._request, "text")
            return [split(text, model.source_lang, at_sentence_ends=body.split_sentences, check=check) for text in some]

        found = await service.each(self._request, cut, self._texts, len)
        self._sentences = [(number, sentence) for number, each in enumerate(found) for sentence in each]
        overrides = given(body, DecodingSettings, "native")
        forced = body.forced_prefix_ids
        if body.forced_prefix is not None:
            if forced is not None:
                raise invalid("forced_prefix", "give it as text or as ids, not both.")
            encode = partial(prefix_ids, body.forced_prefix, model.reader.tokenizer.target)
            forced = list(await service.off_loop(self._request, encode, len(body.forced_prefix)))
        if forced:
            if len(self._sentences) != 1:
                count = len(self._sentences)
                raise invalid(
                    "forced_prefix", f"the text has {count} sentences; send one, or set split_sentences to false."
                )
            overrides["forced_prefix_ids"] = forced
        self._settings = await service.settings_of(self._request, model, overrides)
        terms = parse_terms(body.terms)
        if len(terms) and (forced or self._settings.do_sample):
            raise invalid("terms", "they go with neither a forced prefix nor sampling; leave them out.")
        texts = [sentence.text for _, sentence in self._sentences]
        self._kept = KeptRows(service, self._request, model, self._settings, terms)
        await self._kept.read(texts, owners=[number for number, _ in self._sentences])
        self._rows = self._kept.rows
        num_tokens = sum(row.cost // row.width for row in self._rows if row is not None)  # of the best translations
        self._service.check_alternatives("top_log_probs", num_tokens, body.top_log_probs)

    def _source_ids(self, place: int) -> list[int]:
        """Return what the model reads of a sentence; of one in capitals, what it reads first."""
        rows = (self._rows[row] for row in self._kept.spans[place])
        return next((row.content[0] for row in rows if row is not None), [])

    def _num_source_tokens(self) -> int:
        return sum(len(row.content[0]) for row in self._rows if row is not None)

    async def answer(self) -> Response:
        """Return the whole answer."""
        found = await self._service.run(
            self._request, self._model.begin(self._settings, self._rows), self._rows, self._num_source_tokens()
        )
        candidates = [
            await self._kept.candidates(place, [found[row] for row in span])
            for place, span in enumerate(self._kept.spans)
        ]
        sentences = await self._shown(list(enumerate(candidates)))
        is_plain = not (self._body.alignments or self._body.top_log_probs)
        size = sum(len(one.ids) for hypotheses in found for one in hypotheses or ()) if is_plain else None
        return await large_answer(self._service, self._request, lambda: self._whole(found, sentences), size)

    def _whole(self, found: list[list[Hypothesis] | None], sentences: list[dict[str, Any]]) -> dict[str, Any]:
        translations = []
        places_of: dict[int, list[int]] = {}
        for place, (owner, _) in enumerate(self._sentences):
            places_of.setdefault(owner, []).append(place)
        for number, text in enumerate(self._texts):
            places = places_of.get(number, [])
            best = [sentences[place]["candidates"][0]["text"] for place in places]
            joined = rejoin(text, [self._sentences[place][1] for place in places], best)
            translations.append({"text": joined, "sentences": [sentences[place] for place in places]})
        num_target_tokens = sum(len(one.ids) for hypotheses in found for one in hypotheses or ())
        return {
            "id": self._request.scope["manyheads.id"],
            "model": self._model.name,
            "translations": translations,
            "usage": self._usage(num_target_tokens),
            **({"note": NOTE} if self._body.terms else {}),
        }

    def _usage(self, num_target_tokens: int) -> dict[str, int]:
        return {"source_tokens": self._num_source_tokens(), "target_tokens": num_target_tokens}

    async def events(self) -> AsyncIterator[str]:
        """Yield an event for each sentence as it is finished, and one at the end."""
        numbers = [number for number, row in enumerate(self._rows) if row is not None]
        rows = [row for row in self._rows if row is not None]
        results: dict[int, list[Hypothesis] | None] = {
            number: None for number, row in enumerate(self._rows) if row is None
        }
        place_of = {row: place for place, span in enumerate(self._kept.spans) for row in span}
        num_target_tokens = 0
        try:
            for place, span in enumerate(self._kept.spans):
                if results.keys() >= set(span):
                    yield self._event(place, await self._finished(place, results))
            if rows:
                begun = self._model.begin(self._settings, rows)
                news = self._service.stream(self._request, begun, rows, self._num_source_tokens())
                async with aclosing(news) as found:  # type: ignore[type-var]
                    async for one in found:
                        if isinstance(one, Done):
                            num_target_tokens += one.num_tokens
                            results[numbers[one.row]] = one.content
                            place = place_of[numbers[one.row]]
                            if results.keys() >= set(self._kept.spans[place]):
                                yield self._event(place, await self._finished(place, results))
            record = {"model": self._model.name, "num_sentences": len(self._sentences)}
            yield server_event({**record, "usage": self._usage(num_target_tokens)}, "done")
        except Refusal as refusal:  # the status was sent before
            yield server_event(openai_error(refusal), "error")

    async def _finished(self, place: int, results: dict[int, list[Hypothesis] | None]) -> dict[str, Any]:
        candidates = await self._kept.candidates(place, [results[row] for row in self._kept.spans[place]])
        return (await self._shown([(place, candidates)]))[0]

    def _event(self, place: int, sentence: dict[str, Any]) -> str:
        return server_event({"text": self._sentences[place][0], "sentence": place, **sentence}, "sentence")

    async def _shown(self, found: list[tuple[int, list[Candidate]]]) -> list[dict[str, Any]]:
        """Return the records of some sentences. found: the place and the translations of each."""
        for number, (place, candidates) in enumerate(found):
            if not all(one.hypothesis.token_log_probs for one in candidates):
                scored = await self._scored(self._source_ids(place), [one.hypothesis for one in candidates])
                rescored = [replace(one, hypothesis=each) for one, each in zip(candidates, scored, strict=True)]
                found[number] = (place, rescored)

        def records_of(some: list[tuple[int, list[Candidate]]]) -> list[dict[str, Any]]:
            self._service.check_deadline(self._request)
            return [self._sentence(*one) for one in some]

        def size(one: tuple[int, list[Candidate]]) -> int:
            return len(self._source_ids(one[0])) + sum(len(each.hypothesis.ids) for each in one[1])

        shown = await self._service.each(self._request, records_of, found, size)
        for record, (place, candidates) in zip(shown, found, strict=True):
            if candidates and self._ended(candidates[0].hypothesis):
                await self._look_inside(record, self._source_ids(place), self._ended(candidates[0].hypothesis))
        return shown

    def _sentence(self, place: int, candidates: list[Candidate]) -> dict[str, Any]:
        sentence = self._sentences[place][1]
        record: dict[str, Any] = {"start": sentence.start, "end": sentence.end}
        if not candidates:
            empty = {"text": "", "score": 0.0, "log_prob": 0.0, "tokens": [], "token_ids": [], "token_log_probs": []}
            return {**record, "source_tokens": [], "candidates": [empty]}
        record["source_tokens"] = self._model.reader.tokenizer.source.tokens(self._source_ids(place))
        return {**record, "candidates": [self._candidate(one) for one in candidates]}

    async def _look_inside(self, record: dict[str, Any], source: list[int], target: list[int]) -> None:
        """Add the alignment and the alternatives, if they are asked for, to the record of a sentence."""
        if self._body.alignments and max(len(source), len(target)) <= MOST_MAPPED:
            weights = await self._service.call(
                self._request,
                lambda: mean_map(attention_maps(self._model.reader, source, target).cross),
                len(source) + len(target),
            )
            if weights is not None:
                record["alignment"] = await self._service.off_loop(self._request, partial(rounded, weights))
        if self._body.top_log_probs:
            record["candidates"][0]["top_log_probs"] = await self._alternatives(source, target)

    async def _scored(self, source: list[int], hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """Return the hypotheses of another runtime with torch's log-probabilities and scores."""
        targets = [self._ended(one) for one in hypotheses]
        rows = [Row((source, target, 0), len(source) + len(target)) if target else None for target in targets]
        found: list[ScoredIds | None] = await self._service.run(self._request, self._model.scoring(), rows)
        penalty = BeamRules(self._settings).penalty
        return [
            replace(one, token_log_probs=scored.log_probs, score=sum(scored.log_probs) / penalty(len(target)))
            if scored is not None
            else one
            for one, target, scored in zip(hypotheses, targets, found, strict=True)
        ]

    async def _alternatives(self, source: list[int], target: list[int]) -> list[list[dict[str, Any]]]:
        """Return the most probable tokens at each place of a translation, among those that a search can produce."""
        writer = self._model.reader.tokenizer.target
        never = {writer.pad_id, writer.bos_id, *self._settings.banned_ids} - {writer.eos_id}
        row = Row((source, target, self._body.top_log_probs + len(never)), len(source) + len(target))
        [scored] = await self._service.run(self._request, self._model.scoring(), [row])
        top = [[one for one in each if one[0] not in never][: self._body.top_log_probs] for each in scored.top]
        return await self._service.off_loop(self._request, lambda: of_alternatives(top, writer.tokens))

    def _ended(self, hypothesis: Hypothesis) -> list[int]:
        return [*hypothesis.ids, self._model.reader.tokenizer.target.eos_id] if hypothesis.ended else hypothesis.ids

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        hypothesis = candidate.hypothesis
        writer, ids = self._model.reader.tokenizer.target, self._ended(hypothesis)
        return {
            "text": candidate.text,
            "score": finite(hypothesis.score),
            "log_prob": finite(hypothesis.sum_log_prob),
            **of_tokens(ids, hypothesis.token_log_probs, [], writer.tokens),
        }
