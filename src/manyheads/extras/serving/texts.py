"""The texts of a request: sentences, words that are copied, and whole texts for protocols without sentences.

Of HTML and of documents, `documents` finds the text and restores the rest; the engine runs the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request

from manyheads.decoding.inputs_and_results import Hypothesis, SearchStopped, is_degenerate
from manyheads.extras.constrained.forced import MOST_BEAMS, translate_forced
from manyheads.extras.documents.html import read_html
from manyheads.extras.documents.parts import Document, Text
from manyheads.extras.documents.placing import align
from manyheads.extras.documents.sentence_ends import in_windows, split_sentences
from manyheads.extras.documents.terms import Terms
from manyheads.extras.documents.translating import DocumentTranslation, Unit, UnitTranslator, Work
from manyheads.extras.serving.jobs import CallBatch, Row
from manyheads.extras.serving.refusals import too_long

if TYPE_CHECKING:
    from manyheads.decoding.inputs_and_results import Candidate
    from manyheads.decoding.kept_texts import KeptTexts
    from manyheads.decoding.settings import DecodingSettings
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


MOST_MARKED = 1 << 16
"""Maximum number of characters between two tags, of which one search finds what is kept, such as addresses."""
MOST_TAGS = 2_000
"""Maximum number of tags in all texts of a request.

The time for placing markup grows faster than the number of tags.
"""


@dataclass(frozen=True)
class _End:
    """The records of all units."""

    records: list[str]


async def translate_html(
    service: Service,
    request: Request,
    model: ServedTranslator,
    texts: Sequence[str],
    *,
    at_sentence_ends: bool = True,
    terms: Terms | None = None,
    field: str,
) -> list[str]:
    """Return the translation of each HTML text.

    Tags are kept and enclose the translations of the words that they enclosed.

    Args: terms: to be forced. field: name of the texts' field in messages.

    Raises: Refusal: there are too many texts or tags, or see `Service.run`.
    """
    service.check_count(field, len(texts))
    num_tags = sum(text.count("<") for text in texts)
    if num_tags > MOST_TAGS:
        raise too_long(field, "the number of tags", num_tags, MOST_TAGS, "Send less at once.")
    units = UnitTranslator(model.reader, Terms() if terms is None else terms, {})

    def read(some: list[str]) -> list[DocumentTranslation]:
        documents = (read_html(text) for text in some)
        return [
            sentences_of(service, request, model, units, one, at_sentence_ends=at_sentence_ends, field=field)
            for one in documents
        ]

    documents = await service.each(request, read, texts, len)
    numbers = list(dict.fromkeys(unit for document in documents for unit in document.units))
    found = await translate_units(service, request, model, units, numbers, field)
    records = dict(zip(numbers, found, strict=True))

    def finish(some: list[DocumentTranslation]) -> list[str]:
        return [document.finish([records[unit] for unit in document.units])[0] for document in some]

    return await service.each(
        request, finish, documents, lambda document: sum(len(unit.text) for unit in document.units)
    )


def sentences_of(
    service: Service,
    request: Request,
    model: ServedTranslator,
    units: UnitTranslator,
    document: Document,
    *,
    at_sentence_ends: bool = True,
    field: str,
) -> DocumentTranslation:
    """Return the sentences of a document. Called outside the event loop.

    Raises: Refusal: a paragraph is too long, or there are too many sentences. TimeoutError: see `check_deadline`.
    """
    check = partial(service.check_sentences, request, field)
    pieces = partial(_pieces, language=model.source_lang, check=check) if at_sentence_ends else lambda text: [text]

    def fits(text: str) -> bool:
        service.check_deadline(request)
        return units.fits(text)

    return DocumentTranslation(_checked(document, field), pieces, fits, keep_words=units.keep_words)


async def translate_units(
    service: Service,
    request: Request,
    model: ServedTranslator,
    units: UnitTranslator,
    some: Sequence[Unit],
    field: str,
) -> list[str]:
    """Return the records of units, see `UnitTranslator.translate`. Raises: Refusal: see `Service.run`."""
    work = units.work(some)
    results: list[Any] | None = None

    def next_work() -> Work | _End:
        try:
            return next(work) if results is None else work.send(results)
        except StopIteration as end:
            return _End(end.value)

    while not isinstance(found := await service.off_loop(request, next_work), _End):
        results = await _done(service, request, model, found, field) if found.texts else []
    return found.records


def _checked(document: Document, field: str) -> Document:
    """Raises: Refusal: a stretch of text is so long that a search in it would keep the interpreter's lock for long."""
    longest = max(
        (len(part.text) for each in document.segments for part in each.parts if isinstance(part, Text)), default=0
    )
    if longest > MOST_MARKED:
        raise too_long(
            field,
            "the number of characters of a paragraph",
            longest,
            MOST_MARKED,
            "Divide it into paragraphs with <p>, or send it as plain text.",
        )
    return document


async def _done(service: Service, request: Request, model: ServedTranslator, work: Work, field: str) -> list[Any]:
    """Return the results of some work. A search shares its batch with other requests; the rest is one step each."""
    if work.kind in ("search", "compare"):
        settings = model.settings(work.overrides)
        texts = work.texts if work.kind == "search" else [*work.texts, *work.others]
        rows = await service.rows(request, model, texts, settings, field)
        num_tokens = sum(len(row.content[0]) for row in rows if row is not None)
        found = await service.run(request, model.begin(settings, rows), rows, num_tokens)
        decode = model.reader.tokenizer.target.decode

        def written(some: list[list[Hypothesis] | None]) -> list[str]:
            return [decode(one[0].ids) if one else "" for one in some]

        best = await service.each(request, written, found, lambda one: len(one[0].ids) if one else 0)
        if work.kind == "search":
            return best
        return work.better([(text, one[0]) if one else None for text, one in zip(best, found, strict=True)])
    end = service.end(request)
    encode = model.reader.tokenizer.source.encode
    costs = await service.each(request, lambda some: [2 * len(encode(text)) + 2 for text in some], work.texts, len)
    calls: list[Callable[[], Any]] = []
    for text, other in zip(work.texts, work.others, strict=True):
        if work.kind == "align":
            calls.append(partial(align, model.reader, text, other))
        else:
            calls.append(partial(_forced, model, text, other, work.overrides, end))
    width = MOST_BEAMS if work.kind == "force" else 1
    called = [Row(call, width * cost) for call, cost in zip(calls, costs, strict=True)]
    return await service.run(request, (object(), CallBatch), called)


def _forced(model: ServedTranslator, text: str, phrases: list[str], overrides: dict[str, Any], end: float) -> str:
    """Search on the engine's thread, up to the deadline."""
    settings = model.reader.options(**{**overrides, "max_tokens": model.limits.max_batch_tokens})
    try:
        [found] = translate_forced(
            model.reader.runner,
            model.reader.tokenizer,
            [text],
            [phrases],
            settings,
            stop=lambda: time.monotonic() > end,
        )
    except SearchStopped:
        return ""  # the deadline, for which `Service.stream` answers 504
    return found.text


def _pieces(text: str, *, language: str | None, check: Callable[[int], None]) -> list[str]:
    """Cut a text into its sentences; together they are the text."""
    found: list[str] = []
    for piece in in_windows(text, partial(split_sentences, language=language)):
        check(len(found))
        found.append(piece)
    return found
