"""Translation of HTML: `documents` finds the text and restores the markup; the engine runs the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request

from manyheads.decoding.alignment import align
from manyheads.decoding.forced import MOST_BEAMS, translate_forced
from manyheads.decoding.hypothesis import SearchStopped
from manyheads.documents.html import read_html
from manyheads.documents.terms import Terms
from manyheads.documents.translating import DocumentTranslation, UnitTranslator, Work
from manyheads.serving.batches import CallBatch
from manyheads.serving.jobs import Row
from manyheads.serving.refusals import too_long
from manyheads.serving.served import ServedTranslator
from manyheads.serving.service import Service
from manyheads.text.sentences import split_sentences

__all__ = ["MOST_TAGS", "translate_html"]

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
    field: str,
) -> list[str]:
    """Return the translation of each HTML text.

    Tags are kept and enclose the translations of the words that they enclosed.

    Args: field: name of the texts' field in messages.

    Raises: Refusal: there are too many texts or tags, or see `Service.run`.
    """
    service.check_count(field, len(texts))
    num_tags = sum(text.count("<") for text in texts)
    if num_tags > MOST_TAGS:
        raise too_long(field, "the number of tags", num_tags, MOST_TAGS, "Send less at once.")
    units = UnitTranslator(model.reader, Terms(), {})
    pieces = partial(split_sentences, language=model.source_lang) if at_sentence_ends else lambda text: [text]
    documents = await service.off_loop(
        lambda: [DocumentTranslation(read_html(text), pieces, units.fits) for text in texts]
    )
    numbers = dict.fromkeys(unit for document in documents for unit in document.units)
    work = units.work(list(numbers))
    results: list[Any] | None = None

    def next_work() -> Work | _End:
        try:
            return next(work) if results is None else work.send(results)
        except StopIteration as end:
            return _End(end.value)

    while not isinstance(found := await service.off_loop(next_work), _End):
        results = await _done(service, request, model, found, field) if found.texts else []
    records = dict(zip(numbers, found.records, strict=True))
    return await service.off_loop(
        lambda: [document.finish([records[unit] for unit in document.units])[0] for document in documents]
    )


async def _done(service: Service, request: Request, model: ServedTranslator, work: Work, field: str) -> list[Any]:
    """Return the results of some work. A search shares its batch with other requests; the rest is one step each."""
    if work.kind == "search":
        settings = model.settings(work.overrides)
        rows = await service.off_loop(lambda: model.rows(work.texts, settings, field))
        num_tokens = sum(len(row.content[0]) for row in rows if row is not None)
        found = await service.run(request, model.begin(settings, rows), rows, num_tokens)
        decode = model.reader.tokenizer.target.decode
        return await service.off_loop(lambda: [decode(one[0].ids) if one else "" for one in found])
    end = request.scope["manyheads.arrived"] + service.settings.deadline_seconds
    encode = model.reader.tokenizer.source.encode
    costs = await service.off_loop(lambda: [2 * len(encode(text)) + 2 for text in work.texts])
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
    options = {**overrides, "max_tokens": model.limits.max_batch_tokens}
    try:
        [found] = translate_forced(model.reader, [text], [phrases], stop=lambda: time.monotonic() > end, **options)
    except SearchStopped:
        return ""  # the deadline, for which `Service.stream` answers 504
    return found.text
