"""`/v1/generate`: continuations, whole or as events by token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from manyheads.decoding.generation import NewToken
from manyheads.extras.serving.api.answers import large_answer, server_event
from manyheads.extras.serving.api.fields import finite, given
from manyheads.extras.serving.api.native import records
from manyheads.extras.serving.api.native.bodies import SAMPLING_OPTIONS, GenerateBody
from manyheads.extras.serving.batches import Written
from manyheads.extras.serving.jobs import Done, Row
from manyheads.extras.serving.refusals import Refusal, invalid, openai_error
from manyheads.extras.serving.served import ServedGenerator, find_model
from manyheads.extras.serving.service import Service

__all__ = ["GenerateJob"]


class GenerateJob:
    """Continuations in progress."""

    def __init__(self, service: Service, request: Request, body: GenerateBody, model: ServedGenerator) -> None:
        self._service, self._request, self._body, self._model = service, request, body, model
        self._prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        overrides = given(body, *SAMPLING_OPTIONS)
        if body.stop is not None:
            overrides["stop"] = tuple(body.stop)
        self._settings = model.settings(overrides)
        self._rows: list[Row] = []
        self._num_prompt_tokens = 0  # without the token that begins a document

    @classmethod
    async def prepare(cls, service: Service, request: Request, body: GenerateBody) -> GenerateJob:
        """Tokenise and check. Raises: Refusal, RequestError, ConfigError: the request cannot be served."""
        model = find_model(service.models, body.model, ServedGenerator)
        found = cls(service, request, body, model)
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
            top = records.of_alternatives([token.top[: self._body.top_log_probs]], show)[0]
            for one in top:  # the text that the token adds here
                one["text"] = vocabulary.continuation([before], [one["token_id"]]).decode("utf-8", "replace")
            record["top_log_probs"] = top
        return record

    def _continuation(self, one: Any) -> dict[str, Any]:
        tokens = records.of_tokens(one.ids, one.log_probs, one.top, self._model.reader.vocabulary.tokens)
        return {"text": one.text, "ended_by": one.ended_by, **tokens}
