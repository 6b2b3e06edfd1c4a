"""`/v1/score`: log-probabilities of given translations or texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from manyheads.decoding.text_ids import encode_texts
from manyheads.decoding.truncation import scored_limit
from manyheads.extras.serving.api.answers import large_answer
from manyheads.extras.serving.api.fields import finite
from manyheads.extras.serving.api.languages import translator_for
from manyheads.extras.serving.api.native import records
from manyheads.extras.serving.api.native.bodies import ScoreBody
from manyheads.extras.serving.jobs import Row
from manyheads.extras.serving.refusals import invalid, too_long
from manyheads.extras.serving.scoring import ScoredIds
from manyheads.extras.serving.served import ServedGenerator, ServedModel, find_model
from manyheads.extras.serving.service import Service

__all__ = ["answer_score"]


async def answer_score(service: Service, request: Request, body: ScoreBody) -> Response:
    """Return the answer. Raises: Refusal: the request is invalid or cannot be served."""
    if (body.text is None) == (body.source is None) or (body.source is None) != (body.target is None):
        raise invalid("text", "give either text, or source and target.")
    if body.text is not None:
        for name in ("source_lang", "target_lang"):
            if getattr(body, name) is not None:
                raise invalid(name, "goes with source and target; leave it out.")
        return await _texts(service, request, body, body.text)
    return await _pairs(service, request, body, body.source or [], body.target or [])


async def _texts(service: Service, request: Request, body: ScoreBody, texts: list[str]) -> Response:
    model = find_model(service.models, body.model, ServedGenerator)
    service.check_count("text", len(texts))
    vocabulary = model.reader.vocabulary

    def encode(some: list[str]) -> list[list[int]]:
        encoded = vocabulary.encode_batch(some)
        return [[*ids, vocabulary.line_id] for ids in encoded] if vocabulary.documents == "lines" else encoded

    encoded = await service.each(request, encode, texts, len)
    service.check_alternatives("top_log_probs", sum(map(len, encoded)), body.top_log_probs)
    rows = model.scored_rows(encoded, body.top_log_probs)
    found = await service.run(request, model.scoring(), rows, sum(map(len, encoded)))
    return await _scores(service, request, model, encoded, found, vocabulary.tokens)


async def _pairs(
    service: Service, request: Request, body: ScoreBody, sources: list[str], targets: list[str]
) -> Response:
    model = translator_for(service, body.model, body.source_lang, body.target_lang)
    if len(sources) != len(targets):
        raise invalid("target", f"there are {len(sources)} sources but {len(targets)} targets; send equally many.")
    service.check_count("source", len(sources))
    reader, writer = model.reader.tokenizer.source, model.reader.tokenizer.target

    def encode(some: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        read = encode_texts([source for source, _ in some], reader)
        written = encode_texts([target for _, target in some], writer)
        return [([*one, reader.eos_id], [*other, writer.eos_id]) for one, other in zip(read, written, strict=True)]

    given = list(zip(sources, targets, strict=True))
    pairs = await service.each(request, encode, given, lambda pair: len(pair[0]) + len(pair[1]))
    service.check_alternatives("top_log_probs", sum(len(target) for _, target in pairs), body.top_log_probs)
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
        scores = []
        for ids, one in filled:
            service.check_deadline(request)
            log_prob = finite(sum(one.log_probs))
            scores.append({"log_prob": log_prob, **records.of_tokens(ids, one.log_probs, one.top, show)})
        return {"id": request.scope["manyheads.id"], "model": model.name, "scores": scores}

    return await large_answer(service, request, whole)
