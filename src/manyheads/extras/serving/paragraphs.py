"""Translation of whole texts for protocols that know no sentences: split, translate, rejoin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import Request

from manyheads.decoding.hypothesis import Hypothesis
from manyheads.extras.serving.kept import KeptRows
from manyheads.extras.serving.sentences import Sentence, rejoin, split
from manyheads.extras.serving.served import ServedTranslator
from manyheads.extras.serving.service import Service

__all__ = ["translate_paragraphs"]


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

    def cut(some: list[str]) -> list[list[Sentence]]:
        given = {"at_sentence_ends": at_sentence_ends, "at_line_ends": at_line_ends}
        check = partial(service.check_sentences, request, field)
        return [split(text, model.source_lang, **given, check=check) for text in some]

    sentences = await service.each(request, cut, texts, len)
    owners = [number for number, each in enumerate(sentences) for _ in each]
    flat = [one.text for each in sentences for one in each]
    kept = KeptRows(service, request, model, settings)
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
