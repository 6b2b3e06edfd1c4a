"""Our own protocol: translation with n-best lists and alignments, generation, scoring and attention."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field
from torch import Tensor

from manyheads.decoding.continuation import NewToken
from manyheads.decoding.hypothesis import Hypothesis
from manyheads.decoding.rules import BeamRules
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.truncation import scored_limit
from manyheads.serving.api.answers import STREAMED, large_answer, server_event, whole_or_events
from manyheads.serving.api.fields import Body, Number, Text, finite, given
from manyheads.serving.batches import Written
from manyheads.serving.jobs import Done, Row
from manyheads.serving.names import plain_tag
from manyheads.serving.refusals import Refusal, invalid, openai_error, too_long
from manyheads.serving.scoring import ScoredIds, attention_maps, mean_map
from manyheads.serving.sentences import Sentence, rejoin, split
from manyheads.serving.served import ServedGenerator, ServedModel, ServedTranslator, find_model
from manyheads.serving.service import Service

__all__ = ["router", "translator_for"]

_MOST_WEIGHTS = 1_000_000


class SearchBody(Body):
    """Options of a search and of sampling; those that are not given are the model's."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: Number | None = None
    top_k: int | None = None
    top_p: Number | None = None
    repetition_penalty: Number | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    seed: int | None = None


class TranslateBody(SearchBody):
    """A request for translations. Options that are not given are the model's."""

    model: Text | None = Field(None, description="Name of the model; default: the first that translates.")
    text: Text | list[Text] = Field(description="One text or several.")
    source_lang: Text | None = Field(None, description="Chooses the model by its languages, if no model is named.")
    target_lang: Text | None = None
    split_sentences: bool = Field(
        True, description="Translate each sentence separately; else split at line breaks only."
    )
    stream: bool = Field(False, description="Send the sentences as server-sent events as they are finished.")
    alignments: bool = Field(False, description="Add the cross-attention of the best translation of each sentence.")
    top_log_probs: int = Field(0, ge=0, le=20, description="Alternatives of each token of the best translation.")
    forced_prefix: Text | None = Field(None, description="How the translation begins; for one sentence.")
    forced_prefix_ids: list[int] | None = Field(None, description="The same as token ids.")
    num_beams: int | None = None
    length_penalty: Number | None = None
    length_penalty_kind: Literal["gnmt", "power", "none"] | None = None
    early_stopping: bool | Literal["never"] | None = None


class GenerateBody(SearchBody):
    """A request for continuations. Options that are not given are the model's."""

    model: Text | None = Field(None, description="Name of the model; default: the first language model.")
    prompt: Text | list[Text] = ""
    prompt_ids: list[int] | None = Field(None, description="One prompt as token ids, instead of prompt.")
    stream: bool = Field(False, description="Send the text as server-sent events while it is generated.")
    top_log_probs: int = Field(0, ge=0, le=20, description="Alternatives of each token, best first.")
    stop: list[Text] | None = Field(None, description="Texts that end a continuation.", max_length=16)
    min_p: Number | None = None
    memory_len: int | None = None


class ScoreBody(Body):
    """A request for log-probabilities: of translations (source and target), or of texts."""

    model: Text | None = None
    source_lang: Text | None = Field(None, description="Of pairs: as in /v1/translate.")
    target_lang: Text | None = None
    source: list[Text] | None = Field(None, description="Sources; their translations are in target.")
    target: list[Text] | None = None
    text: list[Text] | None = Field(None, description="Texts for a language model.")
    top_log_probs: int = Field(0, ge=0, le=20, description="Alternatives of each token, best first.")


class AttentionBody(Body):
    """A request for the attention weights of a pair, averaged over layers and heads that are not named."""

    model: Text | None = None
    source_lang: Text | None = Field(None, description="Chooses the model by its languages, if no model is named.")
    target_lang: Text | None = None
    source: Text
    target: Text | None = Field(None, description="Default: the model's own translation.")
    kind: Literal["cross", "encoder", "decoder"] = "cross"
    layer: Annotated[int, Field(ge=0)] | None = None
    head: Annotated[int, Field(ge=0)] | None = None


_SEARCH = (*SearchBody.model_fields, "num_beams", "length_penalty", "length_penalty_kind", "early_stopping")
_SAMPLING = (*SearchBody.model_fields, "min_p", "memory_len")


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(prefix="/v1", tags=["native"])

    @routes.post("/translate", summary="Translate texts.", responses=STREAMED)
    async def translate(request: Request, body: TranslateBody) -> Response:
        job = await _Translation.prepare(service, request, body)
        return await whole_or_events(job, body.stream)

    @routes.post("/generate", summary="Continue texts.", responses=STREAMED)
    async def generate(request: Request, body: GenerateBody) -> Response:
        job = await _Generation.prepare(service, request, body)
        return await whole_or_events(job, body.stream)

    @routes.post("/score", summary="Log-probabilities of given translations or texts.")
    async def score(request: Request, body: ScoreBody) -> Response:
        if (body.text is None) == (body.source is None) or (body.source is None) != (body.target is None):
            raise invalid("text", "give either text, or source and target.")
        if body.text is not None:
            for name in ("source_lang", "target_lang"):
                if getattr(body, name) is not None:
                    raise invalid(name, "goes with source and target; leave it out.")
            return await _score_texts(service, request, body, body.text)
        return await _score_pairs(service, request, body, body.source or [], body.target or [])

    @routes.post("/attention", summary="Attention weights of a translation.")
    async def attention(request: Request, body: AttentionBody) -> Response:
        return await _attention(service, request, body)

    return routes


def translator_for(
    service: Service, name: str | None, source_lang: str | None, target_lang: str | None
) -> ServedTranslator:
    """Return the named model, or the first one for these languages; with neither, the first that translates.

    Raises: Refusal: there is none.
    """
    if name is None and (source_lang or target_lang):
        wanted = [plain_tag(one) if one else None for one in (source_lang, target_lang)]
        for model in service.models.values():
            for source, target in model.pairs:
                if wanted[0] in (None, plain_tag(source)) and wanted[1] in (None, plain_tag(target)):
                    assert isinstance(model, ServedTranslator)
                    return model.into(target_lang or target)
        raise Refusal(
            422, "target_lang: no model here translates between these languages; GET /languages lists them.",
            code="language", field="target_lang",
        )  # fmt: skip
    model = find_model(service.models, name, ServedTranslator)
    return model.into(target_lang)


class _Translation:
    """A translation in progress: its texts, their sentences, and one row of the engine for each sentence."""

    def __init__(self, service: Service, request: Request, body: TranslateBody, model: ServedTranslator) -> None:
        self._service, self._request, self._body, self._model = service, request, body, model
        self._texts = [body.text] if isinstance(body.text, str) else body.text
        self._sentences: list[tuple[int, Sentence]] = []
        self._rows: list[Row | None] = []
        self._settings: DecodingSettings

    @classmethod
    async def prepare(cls, service: Service, request: Request, body: TranslateBody) -> _Translation:
        """Split, tokenise and check. Raises: Refusal, RequestError, ConfigError: the request cannot be served."""
        found = cls(service, request, body, translator_for(service, body.model, body.source_lang, body.target_lang))
        service.check_count("text", len(found._texts))
        size = sum(map(len, found._texts)) + len(body.forced_prefix or "")
        await service.off_loop(found._encode, size)
        return found

    def _encode(self) -> None:
        body, model = self._body, self._model
        self._sentences = [
            (number, sentence)
            for number, text in enumerate(self._texts)
            for sentence in split(text, at_sentence_ends=body.split_sentences)
        ]
        overrides = given(body, *_SEARCH)
        forced = body.forced_prefix_ids
        if body.forced_prefix is not None:
            if forced is not None:
                raise invalid("forced_prefix", "give it as text or as ids, not both.")
            forced = model.reader.tokenizer.target.encode(body.forced_prefix)
        if forced:
            if len(self._sentences) != 1:
                count = len(self._sentences)
                raise invalid(
                    "forced_prefix", f"the text has {count} sentences; send one, or set split_sentences to false."
                )
            overrides["forced_prefix_ids"] = forced
        self._settings = model.settings(overrides)
        self._rows = model.rows([sentence.text for _, sentence in self._sentences], self._settings)

    def _source_ids(self, place: int) -> list[int]:
        row = self._rows[place]
        return [] if row is None else row.content[0]

    def _num_source_tokens(self) -> int:
        return sum(len(self._source_ids(place)) for place in range(len(self._rows)))

    async def answer(self) -> Response:
        """Return the whole answer."""
        found = await self._service.run(
            self._request, self._model.begin(self._settings, self._rows), self._rows, self._num_source_tokens()
        )
        sentences = [await self._sentence(place, hypotheses) for place, hypotheses in enumerate(found)]
        is_plain = not (self._body.alignments or self._body.top_log_probs)
        size = sum(len(one.ids) for hypotheses in found for one in hypotheses or ()) if is_plain else None
        return await large_answer(self._service, lambda: self._whole(found, sentences), size)

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
            "usage": {"source_tokens": self._num_source_tokens(), "target_tokens": num_target_tokens},
        }

    async def events(self) -> AsyncIterator[str]:
        """Yield an event for each sentence as it is finished, and one at the end."""
        places = [place for place, row in enumerate(self._rows) if row is not None]
        rows = [row for row in self._rows if row is not None]
        try:
            for place, row in enumerate(self._rows):
                if row is None:
                    yield self._event(place, await self._sentence(place, None))
            if rows:
                begun = self._model.begin(self._settings, rows)
                news = self._service.stream(self._request, begun, rows, self._num_source_tokens())
                async with aclosing(news) as found:  # type: ignore[type-var]
                    async for one in found:
                        if isinstance(one, Done):
                            place = places[one.row]
                            yield self._event(place, await self._sentence(place, one.content))
            yield server_event({"model": self._model.name, "num_sentences": len(self._rows)}, "done")
        except Refusal as refusal:  # the status was sent before
            yield server_event(openai_error(refusal), "error")

    def _event(self, place: int, sentence: dict[str, Any]) -> str:
        return server_event({"text": self._sentences[place][0], "sentence": place, **sentence}, "sentence")

    async def _sentence(self, place: int, hypotheses: list[Hypothesis] | None) -> dict[str, Any]:
        sentence = self._sentences[place][1]
        record: dict[str, Any] = {"start": sentence.start, "end": sentence.end}
        if not hypotheses:
            empty = {"text": "", "score": 0.0, "log_prob": 0.0, "tokens": [], "token_ids": [], "token_log_probs": []}
            return {**record, "source_tokens": [], "candidates": [empty]}
        source = self._source_ids(place)
        if not all(one.token_log_probs for one in hypotheses):
            hypotheses = await self._scored(source, hypotheses)

        def shown() -> tuple[list[str], list[dict[str, Any]]]:
            return self._model.reader.tokenizer.source.tokens(source), [self._candidate(one) for one in hypotheses]

        size = len(source) + sum(len(one.ids) for one in hypotheses)
        record["source_tokens"], record["candidates"] = await self._service.off_loop(shown, size)
        if self._body.alignments:
            target = self._ended(hypotheses[0])
            weights = await self._service.call(
                self._request,
                lambda: mean_map(attention_maps(self._model.reader, source, target).cross),
                len(source) + len(target),
            )
            if weights is not None:
                record["alignment"] = await self._service.off_loop(partial(_rounded, weights))
        if self._body.top_log_probs:
            record["candidates"][0]["top_log_probs"] = await self._alternatives(source, self._ended(hypotheses[0]))
        return record

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
        return await self._service.off_loop(lambda: _top(top, writer.tokens))

    def _ended(self, hypothesis: Hypothesis) -> list[int]:
        return [*hypothesis.ids, self._model.reader.tokenizer.target.eos_id] if hypothesis.ended else hypothesis.ids

    def _candidate(self, hypothesis: Hypothesis) -> dict[str, Any]:
        writer, ids = self._model.reader.tokenizer.target, self._ended(hypothesis)
        return {
            "text": writer.decode(hypothesis.ids),
            "score": finite(hypothesis.score),
            "log_prob": finite(hypothesis.sum_log_prob),
            **_tokens(ids, hypothesis.token_log_probs, [], writer.tokens),
        }


class _Generation:
    """Continuations in progress."""

    def __init__(self, service: Service, request: Request, body: GenerateBody, model: ServedGenerator) -> None:
        self._service, self._request, self._body, self._model = service, request, body, model
        self._prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        overrides = given(body, *_SAMPLING)
        if body.stop is not None:
            overrides["stop"] = tuple(body.stop)
        self._settings = model.settings(overrides)
        self._rows: list[Row] = []

    @classmethod
    async def prepare(cls, service: Service, request: Request, body: GenerateBody) -> _Generation:
        """Tokenise and check. Raises: Refusal, RequestError, ConfigError: the request cannot be served."""
        model = find_model(service.models, body.model, ServedGenerator)
        found = cls(service, request, body, model)
        service.check_count("prompt", len(found._prompts))
        if body.prompt_ids is not None:
            if body.prompt:
                raise invalid("prompt_ids", "give prompt or prompt_ids, not both.")
            prompts = model.reader.begin_ids([body.prompt_ids])
        else:
            prompts = await service.off_loop(lambda: model.reader.encode_prompts(found._prompts))
        found._rows = model.rows(prompts, found._settings, num_top=body.top_log_probs)
        return found

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(row.content.ids) for row in self._rows)

    async def answer(self) -> Response:
        """Return the whole answer."""
        found = await self._service.run(
            self._request, self._model.begin(self._settings, self._rows), self._rows, self._num_prompt_tokens
        )
        return await large_answer(self._service, lambda: self._whole(found))

    def _whole(self, found: list[list[Written]]) -> dict[str, Any]:
        return {
            "id": self._request.scope["manyheads.id"],
            "model": self._model.name,
            "continuations": [[self._continuation(one) for one in row] for row in found],
            "usage": self._usage(sum(len(one.ids) for row in found for one in row)),
        }

    async def events(self) -> AsyncIterator[str]:
        """Yield an event for each new token of each continuation, and one at the end."""
        num_tokens = 0
        last: dict[tuple[int, int], int] = {}
        try:
            begun = self._model.begin(self._settings, self._rows)
            news = self._service.stream(self._request, begun, self._rows, self._num_prompt_tokens)
            async with aclosing(news) as found:  # type: ignore[type-var]
                async for one in found:
                    if isinstance(one, Done):
                        num_tokens += sum(len(path.ids) for path in one.content)
                        ends = [path.ended_by for path in one.content]
                        yield server_event({"prompt": one.row, "ended_by": ends}, "end")
                        continue
                    token = one.content
                    before = last.get((one.row, token.path), self._rows[one.row].content.ids[-1])
                    last[one.row, token.path] = token.id
                    record = {"prompt": one.row, "path": token.path, "text": token.text, **self._token(token, before)}
                    yield server_event(record, "token")
            yield server_event({"model": self._model.name, "usage": self._usage(num_tokens)}, "done")
        except Refusal as refusal:  # the status was sent before
            yield server_event(openai_error(refusal), "error")

    def _usage(self, num_tokens: int) -> dict[str, int]:
        return {"prompt_tokens": self._num_prompt_tokens, "completion_tokens": num_tokens}

    def _token(self, token: NewToken, before: int) -> dict[str, Any]:
        vocabulary = self._model.reader.vocabulary
        show = vocabulary.tokens
        record = {"token": show([token.id])[0], "token_id": token.id, "log_prob": finite(token.log_prob)}
        if self._body.top_log_probs:
            top = _top([token.top[: self._body.top_log_probs]], show)[0]
            for one in top:  # the text that the token adds here
                one["text"] = vocabulary.continuation([before], [one["token_id"]]).decode("utf-8", "replace")
            record["top_log_probs"] = top
        return record

    def _continuation(self, one: Any) -> dict[str, Any]:
        tokens = _tokens(one.ids, one.log_probs, one.top, self._model.reader.vocabulary.tokens)
        return {"text": one.text, "ended_by": one.ended_by, **tokens}


async def _score_texts(service: Service, request: Request, body: ScoreBody, texts: list[str]) -> Response:
    model = find_model(service.models, body.model, ServedGenerator)
    service.check_count("text", len(texts))
    vocabulary = model.reader.vocabulary

    def encode() -> list[list[int]]:
        encoded = vocabulary.encode_batch(texts)
        return [[*ids, vocabulary.line_id] for ids in encoded] if vocabulary.documents == "lines" else encoded

    encoded = await service.off_loop(encode)
    rows = model.scored_rows(encoded, body.top_log_probs)
    found = await service.run(request, model.scoring(), rows, sum(map(len, encoded)))
    return await _scores(service, request, model, encoded, found, vocabulary.tokens)


async def _score_pairs(
    service: Service, request: Request, body: ScoreBody, sources: list[str], targets: list[str]
) -> Response:
    model = translator_for(service, body.model, body.source_lang, body.target_lang)
    if len(sources) != len(targets):
        raise invalid("target", f"there are {len(sources)} sources but {len(targets)} targets; send equally many.")
    service.check_count("source", len(sources))
    reader, writer = model.reader.tokenizer.source, model.reader.tokenizer.target

    def encode() -> list[tuple[list[int], list[int]]]:
        encoded = zip(reader.encode_batch(sources), writer.encode_batch(targets), strict=True)
        return [([*source, reader.eos_id], [*target, writer.eos_id]) for source, target in encoded]

    pairs = await service.off_loop(encode)
    limit, reason = scored_limit(model.settings({}), model.reader.model.max_len)
    for number, pair in enumerate(pairs):
        for field, ids in zip(("source", "target"), pair, strict=True):
            if len(ids) > limit:
                raise too_long(field, f"the length of text {number + 1} in tokens", len(ids), limit, f"({reason})")
    rows = [Row((source, target, body.top_log_probs), len(source) + len(target)) for source, target in pairs]
    found = await service.run(request, model.scoring(), rows, sum(len(source) for source, _ in pairs))
    return await _scores(service, request, model, [target for _, target in pairs], found, writer.tokens)


async def _scores(
    service: Service,
    request: Request,
    model: ServedModel,
    scored: list[list[int]],
    found: list[ScoredIds | None],
    show: Callable[[list[int]], list[str]],
) -> Response:
    """Return the answer with the log-probabilities of ids. show: readable tokens of ids."""

    def whole() -> dict[str, Any]:
        filled = ((ids, one or ScoredIds()) for ids, one in zip(scored, found, strict=True))
        scores = [
            {"log_prob": finite(sum(one.log_probs)), **_tokens(ids, one.log_probs, one.top, show)}
            for ids, one in filled
        ]
        return {"id": request.scope["manyheads.id"], "model": model.name, "scores": scores}

    return await large_answer(service, whole)


async def _attention(service: Service, request: Request, body: AttentionBody) -> Response:
    model = translator_for(service, body.model, body.source_lang, body.target_lang)
    reader, writer = model.reader.tokenizer.source, model.reader.tokenizer.target
    settings = model.settings({})
    [row] = await service.off_loop(lambda: model.rows([body.source], settings, "source"))
    if row is None:
        raise invalid("source", "there is no text in it; send at least one word.")
    source = row.content[0]
    if body.target is None:
        [[best, *_]] = await service.run(request, model.begin(settings, [row]), [row], len(source))
        target = [*best.ids, writer.eos_id]
    else:
        text = body.target
        target = [*await service.off_loop(lambda: writer.encode(text)), writer.eos_id]
    limit, reason = scored_limit(settings, model.reader.model.max_len)
    if len(target) > limit:
        raise too_long("target", "its length in tokens", len(target), limit, f"({reason})")
    num_weights = {"cross": len(source) * len(target), "encoder": len(source) ** 2, "decoder": len(target) ** 2}
    if num_weights[body.kind] > _MOST_WEIGHTS:
        raise too_long("source", "the number of weights", num_weights[body.kind], _MOST_WEIGHTS, "Send shorter texts.")
    cost = len(source) + len(target)
    maps = await service.call(request, lambda: attention_maps(model.reader, source, target), cost)
    layers: tuple[Tensor, ...] = getattr(maps, body.kind)
    if body.layer is not None and layers:
        if body.layer >= len(layers):
            raise too_long("layer", "its number", body.layer, len(layers) - 1, "Numbers begin at 0.")
        chosen = layers[body.layer : body.layer + 1]
    else:
        chosen = layers
    num_heads = max((len(layer) for layer in chosen), default=0)
    if not num_heads:
        raise Refusal(400, "kind: this model has no such attention weights.", code="model", field="kind")
    if body.head is not None and body.head >= num_heads:
        raise too_long("head", "its number", body.head, num_heads - 1, "Numbers begin at 0.")
    mean = mean_map(chosen, body.head)
    assert mean is not None

    def whole() -> dict[str, Any]:
        read, written = reader.tokens(source), writer.tokens(target)
        keys = {"cross": read, "encoder": read, "decoder": writer.tokens([writer.bos_id, *target[:-1]])}
        return {
            "model": model.name,
            "kind": body.kind,
            "num_layers": len(layers),
            "num_heads": num_heads,
            "query_tokens": read if body.kind == "encoder" else written,
            "key_tokens": keys[body.kind],
            "weights": _rounded(mean),
        }

    return await large_answer(service, whole)


def _tokens(
    ids: list[int], log_probs: list[float], top: list[list[tuple[int, float]]], show: Callable[[list[int]], list[str]]
) -> dict[str, Any]:
    """Return the entries about tokens. top: alternatives of each, if they are asked for."""
    shown = {"tokens": show(ids), "token_ids": ids, "token_log_probs": [finite(value) for value in log_probs]}
    return {**shown, "top_log_probs": _top(top, show)} if top else shown


def _top(top: list[list[tuple[int, float]]], show: Any) -> list[list[dict[str, Any]]]:
    return [
        [{"token": show([index])[0], "token_id": index, "log_prob": finite(value)} for index, value in one]
        for one in top
    ]


def _rounded(weights: Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in weights.tolist()]
