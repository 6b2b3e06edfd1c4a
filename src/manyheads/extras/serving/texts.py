"""The texts of a request: sentences, words that are copied, and whole texts for protocols without sentences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Request

from manyheads.decoding.text_ids import Hypothesis, SearchStopped, is_degenerate
from manyheads.extras.constrained.forced import MOST_BEAMS, translate_forced
from manyheads.extras.documents.sentence_ends import in_windows, split_sentences
from manyheads.extras.documents.terms import Terms
from manyheads.extras.serving.jobs import CallBatch, Row

if TYPE_CHECKING:
    from manyheads.decoding.kept_texts import KeptTexts
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.decoding.text_ids import Candidate
    from manyheads.extras.serving.served import ServedTranslator
    from manyheads.extras.serving.service import Service


@dataclass(frozen=True)
class Sentence:
    """A sentence of a text.

    Args: text: without white space around it. start: its place in the text, in characters.
    """

    text: str
    start: int

    @property
    def end(self) -> int:
        """The place after it."""
        return self.start + len(self.text)


def split(
    text: str,
    language: str | None = None,
    *,
    at_sentence_ends: bool = True,
    at_line_ends: bool = True,
    check: Callable[[int], None] = lambda _: None,
) -> list[Sentence]:
    """Return the sentences of a text in order, separated where it is asked; a text can be one sentence.

    Words are never cut; white space outside sentences belongs to none, so `rejoin` restores it.

    Args:
        language: of the text, as in BCP 47; None: unknown.
        check: called with the number of sentences so far; it may raise an error to end the work.
    """
    found: list[Sentence] = []
    start = 0
    for line in text.split("\n") if at_line_ends else [text]:
        for part in in_windows(line, partial(split_sentences, language=language)) if at_sentence_ends else [line]:
            check(len(found))
            if part.strip():
                found.append(Sentence(part.strip(), start + len(part) - len(part.lstrip())))
            start += len(part)
        start += 1
    return found


def rejoin(text: str, sentences: list[Sentence], translations: list[str]) -> str:
    """Return the text with each sentence replaced by its translation, and the white space between them as it was."""
    parts, place = [], 0
    for sentence, translation in zip(sentences, translations, strict=True):
        parts += [text[place : sentence.start], translation]
        place = sentence.end
    return "".join([*parts, text[place:]])


MOST_CHARACTERS = 1 << 15
"""In a longer sentence nothing is looked for, because a search in it keeps the interpreter's lock."""


class KeptRows:
    """The rows of some texts, and their translations.

    Args: service, request, model, settings: of the request. terms: to be forced in the translations.

    Attributes:
        rows: of all texts. spans: the places of each text's rows.
    """

    def __init__(
        self,
        service: Service,
        request: Request,
        model: ServedTranslator,
        settings: DecodingSettings,
        terms: Terms | None = None,
    ) -> None:
        self._service, self._request, self._model, self._settings = service, request, model, settings
        self._terms = Terms() if terms is None else terms
        self._kept: list[KeptTexts] = []
        self.rows: list[Row | None] = []
        self.spans: list[range] = []

    async def read(self, texts: Sequence[str], field: str = "text", owners: Sequence[int] | None = None) -> None:
        """Read the texts. Args: see `Service.rows`. Raises: as it."""
        whole = replace(self._settings, keep_words=False)

        def kept(some: list[str]) -> list[KeptTexts]:
            self._service.check_deadline(self._request)
            settings = (self._settings if len(text) <= MOST_CHARACTERS else whole for text in some)
            return [self._model.reader.kept([text], one) for text, one in zip(some, settings, strict=True)]

        self._kept = await self._service.each(self._request, kept, texts, len)
        flat = [row for one in self._kept for row in one.rows]
        of_rows = [
            number if owners is None else owners[number] for number, one in enumerate(self._kept) for _ in one.rows
        ]
        self.rows = await self._service.rows(self._request, self._model, flat, self._settings, field, of_rows)
        start = 0
        for one in self._kept:
            self.spans.append(range(start, start + len(one.rows)))
            start += len(one.rows)

    async def candidates(self, place: int, found: Sequence[list[Hypothesis] | None]) -> list[Candidate]:
        """Return the translations of a text, best first; none for an empty text.

        Args: place: of the text. found: the results of its rows.
        """
        kept, hypotheses = self._kept[place], [one or [] for one in found]
        # All terms are looked for in each row.
        lacking = await self._service.off_loop(
            self._request, partial(kept.lacking, hypotheses, self._terms.lacking), len(self._terms) * len(kept.rows)
        )
        end = self._service.end(self._request)
        calls: list[Row | None] = []
        for number, names in lacking.items():
            row = self.rows[self.spans[place][number]]
            cost = MOST_BEAMS * (2 * len(row.content[0]) + 2) if row is not None else 1
            calls.append(Row(partial(self._forced, kept.rows[number], names, end), cost))
        forced = await self._service.run(self._request, (object(), CallBatch), calls) if calls else []
        searched = {
            row: one
            for row, one in zip(lacking, forced, strict=False)
            if self._is_better(kept.rows[row], one, hypotheses[row][0])
        }
        return kept.candidates(hypotheses, searched)[0]

    def _forced(self, text: str, names: Sequence[str], end: float) -> Hypothesis | None:
        """Search on the engine's thread, up to the deadline, for which `Service.stream` answers 504."""
        reader = self._model.reader
        try:
            [found] = translate_forced(
                reader.runner, reader.tokenizer, [text], [names], self._settings, stop=lambda: time.monotonic() > end
            )
        except SearchStopped:
            return None
        return found.hypothesis

    def _is_better(self, text: str, forced: Hypothesis | None, best: Hypothesis) -> bool:
        """Whether a forced translation replaces the best one: not if a term makes the model repeat words."""
        if forced is None or not len(self._terms):
            return forced is not None
        decode = self._model.reader.tokenizer.target.decode
        return not is_degenerate(text, decode(forced.ids)) or is_degenerate(text, decode(best.ids))


async def translate_paragraphs(
    service: Service,
    request: Request,
    model: ServedTranslator,
    texts: Sequence[str],
    *,
    num_alternatives: int = 0,
    at_sentence_ends: bool = True,
    at_line_ends: bool = True,
    terms: Terms | None = None,
    field: str,
) -> list[list[str]]:
    """Return for each text its best translation and up to `num_alternatives` others.

    The alternatives of a text of several sentences combine the alternatives of equal rank of its sentences.

    Args: terms: to be forced. field: name of the texts' field in messages.

    Raises: Refusal: a text is too long, there are too many, or see `Service.run`.
    """
    service.check_count(field, len(texts))
    count = 1 + num_alternatives
    overrides = {"num_return_sequences": count}
    if num_alternatives:
        overrides["num_beams"] = max(count, model.settings({}).num_beams)
    settings = model.settings(overrides)

    def cut(some: list[str]) -> list[list[Sentence]]:
        given = {"at_sentence_ends": at_sentence_ends, "at_line_ends": at_line_ends}
        check = partial(service.check_sentences, request, field)
        return [split(text, model.source_lang, **given, check=check) for text in some]

    sentences = await service.each(request, cut, texts, len)
    owners = [number for number, each in enumerate(sentences) for _ in each]
    flat = [one.text for each in sentences for one in each]
    kept = KeptRows(service, request, model, settings, terms)
    await kept.read(flat, field, owners)
    num_tokens = sum(len(row.content[0]) for row in kept.rows if row is not None)
    found = await service.run(request, model.begin(settings, kept.rows), kept.rows, num_tokens)
    written = []
    for place, span in enumerate(kept.spans):
        service.check_deadline(request)
        written.append([one.text for one in await kept.candidates(place, [found[row] for row in span])] or [""])
    candidates = iter(written)

    def finish() -> list[list[str]]:
        results = []
        for text, own in zip(texts, sentences, strict=True):
            mine = [next(candidates) for _ in own]
            most = max(map(len, mine), default=1)
            ranks = [[each[min(rank, len(each) - 1)] for each in mine] for rank in range(min(count, most))]
            results.append([rejoin(text, own, rank) for rank in ranks])
        return results

    return await service.off_loop(request, finish, sum(map(_num_tokens, found)))


def _num_tokens(hypotheses: list[Hypothesis] | None) -> int:
    return sum(len(one.ids) for one in hypotheses or ())
