"""Translation of HTML and of documents: `documents` finds the text and restores the rest; the engine runs the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request

from manyheads.decoding.text_ids import Hypothesis, SearchStopped
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
    from manyheads.extras.serving.served import ServedTranslator
    from manyheads.extras.serving.service import Service

MOST_CHARACTERS = 1 << 16
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
    if longest > MOST_CHARACTERS:
        raise too_long(
            field,
            "the number of characters of a paragraph",
            longest,
            MOST_CHARACTERS,
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
