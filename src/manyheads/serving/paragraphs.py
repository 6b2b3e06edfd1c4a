"""Translation of whole texts for protocols that know no sentences: split, translate, rejoin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request

from manyheads.serving.jobs import Row
from manyheads.serving.sentences import Sentence, rejoin, split
from manyheads.serving.served import ServedTranslator
from manyheads.serving.service import Service

__all__ = ["translate_paragraphs"]


@dataclass(frozen=True)
class _Plan:
    sentences: list[list[Sentence]]
    rows: list[Row | None]


async def translate_paragraphs(
    service: Service,
    request: Request,
    model: ServedTranslator,
    texts: Sequence[str],
    *,
    num_alternatives: int = 0,
    at_sentence_ends: bool = True,
    at_line_ends: bool = True,
    field: str,
) -> list[list[str]]:
    """Return for each text its best translation and up to `num_alternatives` others.

    The alternatives of a text of several sentences combine the alternatives of equal rank of its sentences.

    Args: field: name of the texts' field in messages.

    Raises: Refusal: a text is too long, there are too many, or see `Service.run`.
    """
    service.check_count(field, len(texts))
    count = 1 + num_alternatives
    overrides = {"num_return_sequences": count}
    if num_alternatives:
        overrides["num_beams"] = max(count, model.settings({}).num_beams)
    settings = model.settings(overrides)

    def plan() -> _Plan:
        sentences = [
            split(text, model.source_lang, at_sentence_ends=at_sentence_ends, at_line_ends=at_line_ends)
            for text in texts
        ]
        owners = [number for number, each in enumerate(sentences) for _ in each]
        flat = [one.text for each in sentences for one in each]
        return _Plan(sentences, model.rows(flat, settings, field, owners=owners))

    planned = await service.off_loop(plan, sum(map(len, texts)))
    num_tokens = sum(len(row.content[0]) for row in planned.rows if row is not None)
    found = await service.run(request, model.begin(settings, planned.rows), planned.rows, num_tokens)
    decode = model.reader.tokenizer.target.decode

    def finish() -> list[list[str]]:
        results, hypotheses = [], iter(found)
        for text, sentences in zip(texts, planned.sentences, strict=True):
            candidates = [[decode(one.ids) for one in next(hypotheses) or ()] or [""] for _ in sentences]
            most = max(map(len, candidates), default=1)
            ranks = [[each[min(rank, len(each) - 1)] for each in candidates] for rank in range(min(count, most))]
            results.append([rejoin(text, sentences, rank) for rank in ranks])
        return results

    size = sum(len(one.ids) for hypotheses in found for one in hypotheses or ())
    return await service.off_loop(finish, size)
