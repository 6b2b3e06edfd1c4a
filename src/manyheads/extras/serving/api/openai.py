"""OpenAI's protocol for completions, and vLLM's paths for tokens: language models for existing tools.

Evaluators score texts through it: `echo` with `logprobs` and `max_tokens` 0 or 1 gives the log-probability of every
token of the prompt.
"""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from manyheads import __version__
from manyheads.decoding.generation import NewToken, context_settings
from manyheads.decoding.inputs_and_results import with_end
from manyheads.decoding.settings import GenerationSettings, drawing_options
from manyheads.errors import ConfigError
from manyheads.extras.serving.api.shared import (
    STREAMED,
    Ids,
    ListsOfIds,
    LooseBody,
    Number,
    Text,
    Texts,
    body_of,
    finite,
    given,
    large_answer,
    server_event,
    whole_or_events,
)
from manyheads.extras.serving.jobs import Done, Row, ScoredIds, Written
from manyheads.extras.serving.refusals import Refusal, invalid, openai_error, refuse_unsupported, too_long
from manyheads.extras.serving.served import AnyServed, ServedGenerator, find_model

if TYPE_CHECKING:
    from manyheads.extras.serving.service import Service
    from manyheads.text.vocabulary import Vocabulary

_MOST_LOGPROBS = 20
_MOST_STOPS = 4


class StreamOptions(LooseBody):
    """Options of a streamed answer."""

    include_usage: bool = False


class JsonSchema(LooseBody):
    """A named schema."""

    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(LooseBody):
    """The form of an answer: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class CompletionBody(body_of(GenerationSettings, "openai", LooseBody)):  # type: ignore[misc]
    """A request for completions. Unknown fields are ignored, as OpenAI's clients expect."""

    model: Text | None = None
    prompt: Text | Texts | Ids | ListsOfIds = ""
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    n: Annotated[int, Field(ge=1)] | None = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    stop: Text | Texts | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = 1.0
    top_p: Number | None = 1.0
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    suffix: Text | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[Text, Number] | None = None
    response_format: ResponseFormat | None = None


class TokenizeBody(LooseBody):
    """A request for the tokens of a text."""

    model: Text | None = None
    prompt: Text
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class DetokenizeBody(LooseBody):
    """A request for the text of tokens."""

    model: Text | None = None
    tokens: Ids


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/completions", summary="Continue texts (OpenAI).", responses=STREAMED)
    async def completions(request: Request, body: CompletionBody) -> Response:
        job = await _Completion.prepare(service, request, body)
        return await whole_or_events(job, body.stream)

    @routes.get("/v1/models", summary="The models of this server.")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_described(model) for model in service.models.values()]})

    @routes.get("/v1/models/{name}", summary="One model.")
    async def model(name: str) -> Response:
        if name not in service.models:
            raise Refusal(404, "There is no such model here.", code="model_not_found", field="model")
        return JSONResponse(_described(service.models[name]))

    @routes.post("/tokenize", summary="Text to tokens (vLLM).")
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        chosen = _any_model(service, body.model)
        ids = await service.off_loop(request, lambda: _ids(chosen, body.prompt, bool(body.add_special_tokens)))
        record = {"count": len(ids), "max_model_len": _max_len(chosen), "tokens": ids}
        if body.return_token_strs:
            record["token_strs"] = await service.each(request, partial(_names, chosen), ids, lambda _: 1)
        return await large_answer(service, request, lambda: record)

    @routes.post("/detokenize", summary="Tokens to text (vLLM).")
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        chosen = _any_model(service, body.model)
        decode = chosen.reader.vocabulary if chosen.task == "language-modelling" else chosen.reader.tokenizer.source
        wrong = next((index for index in body.tokens if index >= decode.vocab_size), None)
        if wrong is not None:
            raise invalid("tokens", f"{wrong} is not an id of this model; ids are 0 to {decode.vocab_size - 1:,}.")
        return await large_answer(service, request, lambda: {"prompt": decode.decode(body.tokens)})

    @routes.get("/tokenizer_info", summary="About the tokenizer (vLLM).")
    async def tokenizer_info(model: str | None = None) -> Response:
        chosen = _any_model(service, model)
        record: dict[str, Any] = {"tokenizer_class": "manyheads", "chat_template": None, "bos_token": None,
                                  "eos_token": None, "pad_token": None}  # fmt: skip
        if chosen.task == "language-modelling":
            vocabulary = chosen.reader.vocabulary
            end = vocabulary.start_id
            record |= {"vocab_size": vocabulary.vocab_size, "eos_token": _shown(vocabulary, end), "eos_token_id": end}
        else:
            side = chosen.reader.tokenizer.source
            record |= {"vocab_size": side.vocab_size, "eos_token": side.tokens([side.eos_id])[0],
                       "eos_token_id": side.eos_id}  # fmt: skip
        return JSONResponse(record)

    @routes.get("/version", summary="The version of the server.")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    return routes


@dataclass
class _LogProbs:
    """OpenAI's record of log-probabilities, under construction."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float | None] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: str, log_prob: float | None, top: Sequence[tuple[str, float]] | None, offset: int) -> None:
        self.tokens.append(token)
        self.token_logprobs.append(None if log_prob is None else finite(log_prob))
        tops: dict[str, float | None] | None = None if top is None else {}
        for name, value in top or ():
            assert tops is not None
            tops.setdefault(name, finite(value))  # best first, so of two tokens that look alike the better one stays
        if tops is not None and log_prob is not None:
            tops.setdefault(token, finite(log_prob))
        self.top_logprobs.append(tops)
        self.text_offset.append(offset)


class _Offsets:
    """Where tokens begin in the generated text, in characters. A character of several tokens counts with its last one.

    Args: before: ids before the first token. begin: where the first token begins.
    """

    def __init__(self, vocabulary: Vocabulary, before: list[int], begin: int) -> None:
        self._vocabulary, self._last, self._end = vocabulary, before[-4:], begin
        self._at_border = bool(before) and before[-1] in vocabulary.spaced_ids()[0]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        """Return where the next token begins."""
        begin = self._end
        new = self._vocabulary.continuation(self._last, [token])
        new = new.removeprefix(b" ") if self._at_border else new  # the prompt has it; see `Generation`
        self._end += len(self._decoder.decode(new))
        self._last, self._at_border = [*self._last, token][-4:], False
        return begin


class _Completion:
    """Completions in progress."""

    _settings: GenerationSettings  # set by `prepare`

    def __init__(self, service: Service, request: Request, body: CompletionBody, model: ServedGenerator) -> None:
        self._service, self._request, self._body, self._model = service, request, body, model
        self._vocabulary = model.reader.vocabulary
        self._id = f"cmpl-{request.scope['manyheads.id']}"
        self._created = int(time.time())
        self._n = body.n or 1
        self._best_of = max(self._n, body.best_of or 1)
        self._is_sampled = body.temperature is None or body.temperature > 0
        self._copies = 1 if self._is_sampled else self._n
        self._max_tokens = 16 if body.max_tokens is None else body.max_tokens
        self._prompts: list[list[int]] = []
        self._texts: list[str] = []
        self._rows: list[Row] = []

    @classmethod
    async def prepare(cls, service: Service, request: Request, body: CompletionBody) -> _Completion:
        """Tokenise and check. Raises: Refusal, RequestError, ConfigError: the request cannot be served."""
        model = find_model(service.models, body.model, ServedGenerator)
        refuse_unsupported(body, "suffix", "presence_penalty", "frequency_penalty", "logit_bias")
        found = cls(service, request, body, model)
        most = model.limits.max_batch_rows  # also of copies, which cost no row
        if found._best_of > most:
            raise too_long("n", "the number of continuations of a prompt", found._best_of, most, "Ask for fewer.")
        if body.best_of is not None and body.best_of < found._n:
            raise Refusal(400, f"best_of: it is {body.best_of}, but n is {found._n}; choose at least n.",
                          code="invalid", field="best_of")  # fmt: skip
        if body.stream and found._best_of > found._n:
            raise Refusal(400, "best_of: it cannot be streamed; set stream to false.", code="invalid", field="best_of")
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(stops) > _MOST_STOPS:
            raise Refusal(422, f"stop: there are {len(stops)} texts; the limit is {_MOST_STOPS}.", code="over_limit",
                          field="stop")  # fmt: skip
        overrides = found._overrides(tuple(stop for stop in stops if stop)) | _form(body.response_format)
        try:
            found._settings = await service.settings_of(request, model, overrides)
        except ConfigError as error:
            if "json_schema" not in error.fields:
                raise
            raise Refusal(400, f"response_format: {error}", code="invalid", field="response_format") from error
        await found._encode()
        return found

    def _overrides(self, stops: tuple[str, ...]) -> dict[str, Any]:
        body = self._body
        paths = self._best_of if self._is_sampled else 1  # without sampling all would be the same
        overrides: dict[str, Any] = {
            "do_sample": self._is_sampled,
            "num_return_sequences": paths,
            "max_new_tokens": max(1, self._max_tokens),
            "min_new_tokens": 0,
            "stop": stops,
            "seed": secrets.randbits(31) if body.seed is None else body.seed,
        }
        options = given(body, GenerationSettings, "openai")
        if "top_k" in options:
            options["top_k"] = max(0, options["top_k"])  # vLLM's clients send -1 for "all"
        drawing = drawing_options(GenerationSettings)
        if self._is_sampled:  # the protocol's own defaults, and not the model's
            sent = {"temperature": body.temperature, "top_p": body.top_p}
            overrides |= drawing | {name: value for name, value in sent.items() if value is not None}
        else:
            options = {name: value for name, value in options.items() if name not in drawing}
        return overrides | options

    async def _encode(self) -> None:
        prompt: Any = self._body.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise Refusal(400, "prompt: the list is empty; send a text or ids.", code="invalid", field="prompt")
        self._service.check_count("prompt", len(prompt))
        reader = self._model.reader

        def encode(some: list[Any]) -> list[tuple[list[int], str]]:
            if isinstance(some[0], str):
                return list(zip(reader.vocabulary.encode_batch(some), some, strict=True))
            reader.begin_ids(some)  # checks the ids
            return [(list(ids), reader.vocabulary.decode(ids)) for ids in some]

        for ids, text in await self._service.each(self._request, encode, prompt, len):
            self._prompts.append(ids)
            self._texts.append(text)
        begun = reader.begin_ids(self._prompts)
        self._rows = self._model.rows(begun, self._settings, num_top=self._body.logprobs or 0)
        if self._body.logprobs is not None:
            num_tokens = self._best_of * sum(row.cost // row.width for row in self._rows)  # copies cost no row
            self._service.check_alternatives("logprobs", num_tokens, self._body.logprobs + 1)  # and the token itself

    async def answer(self) -> Response:
        """Return the whole answer."""
        scored = await self._scored()
        found = await self._generated()
        return await large_answer(self._service, self._request, lambda: self._whole(scored, found))

    def _whole(self, scored: list[ScoredIds | None], found: list[list[Written]]) -> dict[str, Any]:
        choices = []
        for number, (text, written) in enumerate(zip(self._texts, found, strict=True)):
            for path, one in enumerate(self._best(written)):
                self._service.check_deadline(self._request)
                choices.append(self._choice(number * self._n + path, text, scored[number], self._prompts[number], one))
        num_new = self._copies * sum(len(one.ids) for written in found for one in written)
        return {**self._head(), "choices": choices, "usage": self._usage(num_new)}

    async def _generated(self) -> list[list[Written]]:
        if not self._max_tokens:
            return [[Written()] for _ in self._rows]
        begun = self._model.begin(self._settings, self._rows)
        return await self._service.run(self._request, begun, self._rows, self._num_prompt_tokens)

    async def _scored(self) -> list[ScoredIds | None]:
        """Return the log-probabilities of the prompts, if they are asked for."""
        if not self._body.echo or self._body.logprobs is None:
            return [None] * len(self._prompts)
        rows = self._model.scored_rows(self._prompts, self._body.logprobs, "prompt")
        return await self._service.run(self._request, self._model.scoring(), rows)

    def _best(self, written: list[Written]) -> list[Written]:
        """Return n of the continuations: those with the highest log-probability per token."""
        if not self._is_sampled or not self._max_tokens:
            return written[:1] * self._n
        if self._best_of == self._n:
            return written
        return sorted(written, key=lambda one: -sum(one.log_probs) / max(1, len(one.ids)))[: self._n]

    def _choice(
        self, index: int, text: str, scored: ScoredIds | None, prompt: list[int], written: Written
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._of_prompt(prompt, scored) if self._body.echo else _LogProbs()
            offsets = _Offsets(self._vocabulary, prompt, len(text) if self._body.echo else 0)
            for place, (token, log_prob) in enumerate(zip(written.ids, written.log_probs, strict=True)):
                top = self._named(written.top[place]) if written.top else []
                logprobs.add(self._name(token), log_prob, top, offsets.next(token))
        return {
            "index": index,
            "text": (text if self._body.echo else "") + written.text,
            "logprobs": logprobs and vars(logprobs),
            "finish_reason": "length" if written.ended_by == "length" else "stop",
        }

    def _of_prompt(self, prompt: list[int], scored: ScoredIds | None) -> _LogProbs:
        """Return the record of a prompt's tokens, the first without log-probability."""
        logprobs, offsets = _LogProbs(), _Offsets(self._vocabulary, [], 0)
        for place, token in enumerate(prompt):
            offset = offsets.next(token)
            if place and scored is not None:
                top = self._named(scored.top[place]) if scored.top else []
                logprobs.add(self._name(token), scored.log_probs[place], top, offset)
            else:
                logprobs.add(self._name(token), None, None, offset)
        return logprobs

    async def events(self) -> AsyncIterator[str]:
        """Yield chunks as tokens are generated, then the usage if it is asked for, then the end mark."""
        num_new = 0
        offsets = {
            (row, path): _Offsets(self._vocabulary, prompt, len(text) if self._body.echo else 0)
            for row, (prompt, text) in enumerate(zip(self._prompts, self._texts, strict=True))
            for path in range(self._n)
        }
        try:
            if self._body.echo:
                scored = await self._scored()
                for number, text in enumerate(self._texts):
                    for path in range(self._n):
                        logprobs = None
                        if self._body.logprobs is not None:
                            logprobs = await self._service.off_loop(
                                self._request, partial(self._of_prompt, self._prompts[number], scored[number])
                            )
                        chunk = partial(self._chunk, number * self._n + path, text, logprobs, None)
                        yield await self._service.off_loop(self._request, chunk, len(text))
            if self._max_tokens:
                begun = self._model.begin(self._settings, self._rows)
                news = self._service.stream(self._request, begun, self._rows, self._num_prompt_tokens)
                async with aclosing(news) as found:  # type: ignore[type-var]
                    async for one in found:
                        if isinstance(one, Done):
                            continue
                        token: NewToken = one.content
                        num_new += self._copies
                        for path in range(token.path, token.path + self._copies):
                            yield self._token_chunk(one.row, path, token, offsets[one.row, path])
            else:
                for index in range(len(self._texts) * self._n):
                    yield self._chunk(index, "", None, "length")
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield server_event({**self._head(), "choices": [], "usage": self._usage(num_new)})
            yield "data: [DONE]\n\n"
        except Refusal as refusal:  # the status was sent before; OpenAI's clients raise for an error in a chunk
            yield server_event(openai_error(refusal))

    def _token_chunk(self, row: int, path: int, token: NewToken, offsets: _Offsets) -> str:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = _LogProbs()
            top, offset = self._named(token.top[: self._body.logprobs]), offsets.next(token.id)
            logprobs.add(self._name(token.id), token.log_prob, top, offset)
        reason = None
        if token.ended is not None:
            reason = "length" if token.ended.ended_by == "length" else "stop"
        return self._chunk(row * self._n + path, token.text, logprobs, reason)

    def _chunk(self, index: int, text: str, logprobs: _LogProbs | None, reason: str | None) -> str:
        choice = {"index": index, "text": text, "logprobs": logprobs and vars(logprobs), "finish_reason": reason}
        return server_event({**self._head(), "choices": [choice]})

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model.name}

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(map(len, self._prompts))

    def _usage(self, num_new: int) -> dict[str, int]:
        total = self._num_prompt_tokens + num_new
        return {"prompt_tokens": self._num_prompt_tokens, "completion_tokens": num_new, "total_tokens": total}

    def _name(self, token: int) -> str:
        return _shown(self._vocabulary, token)

    def _named(self, top: Sequence[tuple[int, float]]) -> list[tuple[str, float]]:
        return [(self._name(token), value) for token, value in top]


def _form(asked: ResponseFormat | None) -> dict[str, Any]:
    """Return the options for the form of an answer. Raises: Refusal: the schema is missing."""
    if asked is None or asked.type == "text":
        return {}
    if asked.type == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if asked.json_schema is None:
        raise Refusal(400, "response_format: json_schema is missing; send an object with the schema.", code="invalid",
                      field="response_format")  # fmt: skip
    return {"json_schema": json.dumps(asked.json_schema.json_schema)}


def _shown(vocabulary: Vocabulary, token: int) -> str:
    """Return the text of a token; its readable form if it has no text of its own, such as a part of a character."""
    text = vocabulary.decode([token])
    return text if text and "\ufffd" not in text else vocabulary.tokens([token])[0]


def _described(model: AnyServed) -> dict[str, Any]:
    languages = [{"source": source, "target": target} for source, target in model.pairs]
    record: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "manyheads",
        "languages": languages,
        "max_model_len": _max_len(model),
    }
    if model.task == "language-modelling":
        attending = context_settings(model.reader.model, model.settings({}))
        return {**record, "task": "text-generation", "memory_len": getattr(attending, "memory_len", None)}
    return {**record, "task": "translation"}


def _any_model(service: Service, name: str | None) -> AnyServed:
    """Return the named model, or the first language model, or the first model. Raises: Refusal: there is none."""
    if name is None:
        models = list(service.models.values())
        return next((model for model in models if model.task == "language-modelling"), models[0])
    if name not in service.models:
        known = ", ".join(service.models)
        raise Refusal(404, f"model: there is no such model here. Models: {known}.", code="model_not_found",
                      field="model")  # fmt: skip
    return service.models[name]


def _max_len(model: AnyServed) -> int:
    """Return the length of the longest text, in tokens: the model's limit, or the server's."""
    return model.reader.model.max_len or model.limits.max_batch_tokens


def _ids(model: AnyServed, text: str, with_special: bool) -> list[int]:
    """Return the ids of a text. The server itself adds the token that begins a text to a model."""
    if model.task == "language-modelling":
        return model.reader.vocabulary.encode(text)
    side = model.reader.tokenizer.source
    ids = side.encode(text)
    return with_end(ids, side) if with_special else ids


def _names(model: AnyServed, ids: list[int]) -> list[str]:
    """Return readable tokens."""
    if model.task == "language-modelling":
        return [_shown(model.reader.vocabulary, token) for token in ids]
    return model.reader.tokenizer.source.tokens(ids)
