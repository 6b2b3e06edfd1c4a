"""The routes of our own protocol; all of its answers but translations: continuations, scores, attention."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from torch import Tensor

from manyheads.decoding.inputs_and_results import encode_texts, scored_limit, with_end
from manyheads.decoding.settings import GenerationSettings
from manyheads.extras.serving.api.native.translation import (
    AttentionBody,
    GenerateBody,
    ScoreBody,
    TranslateBody,
    TranslateJob,
    of_alternatives,
    of_tokens,
    rounded,
)
from manyheads.extras.serving.api.shared import (
    STREAMED,
    finite,
    given,
    large_answer,
    server_event,
    translator_for,
    whole_or_events,
)
from manyheads.extras.serving.jobs import MOST_MAPPED, Done, Row, ScoredIds, Written, attention_maps, mean_map
from manyheads.extras.serving.refusals import Refusal, invalid, openai_error, too_long
from manyheads.extras.serving.served import ServedGenerator, ServedModel, find_model

if TYPE_CHECKING:
    from manyheads.decoding.generation import NewToken
    from manyheads.extras.serving.service import Service


class GenerateJob:
    """Continuations in progress."""

    def __init__(
        self,
        service: Service,
        request: Request,
        body: GenerateBody,
        model: ServedGenerator,
        settings: GenerationSettings,
    ) -> None:
        self._service, self._request, self._body, self._model = service, request, body, model
        self._prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._settings = settings
        self._rows: list[Row] = []
        self._num_prompt_tokens = 0  # without the token that begins a document

    @classmethod
    async def prepare(cls, service: Service, request: Request, body: GenerateBody) -> GenerateJob:
        """Tokenise and check. Raises: Refusal, RequestError, ConfigError: the request cannot be served."""
        model = find_model(service.models, body.model, ServedGenerator)
        settings = await service.settings_of(request, model, given(body, GenerationSettings, "native"))
        found = cls(service, request, body, model, settings)
        service.check_count("prompt", len(found._prompts))
        if body.prompt_ids is not None:
            if body.prompt:
                raise invalid("prompt_ids", "give prompt or prompt_ids, not both.")
            prompts = [body.prompt_ids]
        else:
            prompts = await service.each(request, model.reader.vocabulary.encode_batch, found._prompts, len)
        if not prompts:
            raise Refusal(400, "prompt: the list is empty; send a text.", code="invalid", field="prompt")
        found._num_prompt_tokens = sum(map(len, prompts))
        found._rows = model.rows(model.reader.begin_ids(prompts), found._settings, num_top=body.top_log_probs)
        service.check_alternatives("top_log_probs", sum(row.cost for row in found._rows), body.top_log_probs)
        return found

    async def answer(self) -> Response:
        """Return the whole answer."""
        found = await self._service.run(
            self._request, self._model.begin(self._settings, self._rows), self._rows, self._num_prompt_tokens
        )
        return await large_answer(self._service, self._request, lambda: self._whole(found))

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
            top = of_alternatives([token.top[: self._body.top_log_probs]], show)[0]
            for one in top:  # the text that the token adds here
                one["text"] = vocabulary.continuation([before], [one["token_id"]]).decode("utf-8", "replace")
            record["top_log_probs"] = top
        return record

    def _continuation(self, one: Any) -> dict[str, Any]:
        tokens = of_tokens(one.ids, one.log_probs, one.top, self._model.reader.vocabulary.tokens)
        return {"text": one.text, "ended_by": one.ended_by, **tokens}


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
        return [(with_end(one, reader), [*other, writer.eos_id]) for one, other in zip(read, written, strict=True)]

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
            scores.append({"log_prob": log_prob, **of_tokens(ids, one.log_probs, one.top, show)})
        return {"id": request.scope["manyheads.id"], "model": model.name, "scores": scores}

    return await large_answer(service, request, whole)


async def answer_attention(service: Service, request: Request, body: AttentionBody) -> Response:
    """Return the answer. Raises: Refusal: the request is invalid or cannot be served."""
    model = translator_for(service, body.model, body.source_lang, body.target_lang)
    reader, writer = model.reader.tokenizer.source, model.reader.tokenizer.target
    settings = model.settings({})
    [row] = await service.rows(request, model, [body.source], settings, "source")
    if row is None:
        raise invalid("source", "there is no text in it; send at least one word.")
    source = row.content[0]
    if body.target is None:
        [[best, *_]] = await service.run(request, model.begin(settings, [row]), [row], len(source))
        target = [*best.ids, writer.eos_id] if best.ended else best.ids
    else:
        texts = [body.target]
        [ids] = await service.each(request, lambda some: encode_texts(some, writer), texts, len)
        target = [*ids, writer.eos_id]
    limit, reason = scored_limit(settings, model.reader.model.max_len)
    if len(target) > limit:
        raise too_long("target", "its length in tokens", len(target), limit, f"({reason})")
    longest = max(len(source), len(target))
    if longest > MOST_MAPPED:
        raise too_long("source", "the length of the longer side in tokens", longest, MOST_MAPPED, "Send shorter texts.")
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
            "weights": rounded(mean),
        }

    return await large_answer(service, request, whole)


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(prefix="/v1", tags=["native"])

    @routes.post("/translate", summary="Translate texts.", responses=STREAMED)
    async def translate(request: Request, body: TranslateBody) -> Response:
        job = await TranslateJob.prepare(service, request, body)
        return await whole_or_events(job, body.stream)

    @routes.post("/generate", summary="Continue texts.", responses=STREAMED)
    async def generate(request: Request, body: GenerateBody) -> Response:
        job = await GenerateJob.prepare(service, request, body)
        return await whole_or_events(job, body.stream)

    @routes.post("/score", summary="Log-probabilities of given translations or texts.")
    async def score(request: Request, body: ScoreBody) -> Response:
        return await answer_score(service, request, body)

    @routes.post("/attention", summary="Attention weights of a translation.")
    async def attention(request: Request, body: AttentionBody) -> Response:
        return await answer_attention(service, request, body)

    return routes
