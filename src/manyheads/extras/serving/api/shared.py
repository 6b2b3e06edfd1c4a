"""What several protocols share: types of fields, bodies as forms, the model for two languages, and answers.

The JSON of answers that are large or are sent in parts is built outside the event loop, which can answer other requests
in the meantime.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from manyheads.config.files import field_types
from manyheads.decoding.settings import facts_of
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.served import ServedTranslator, find_model
from manyheads.extras.serving.service import Service, is_few
from manyheads.extras.serving.settings import plain_tag

_FAR = 2  # more than any distance between a language and the same one of a region


def _check_text(text: str) -> str:
    """Raises: ValueError: the text has an unpaired surrogate, which no encoding can represent."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"a text of {len(text):,} characters has an unpaired surrogate; send valid Unicode") from None
    return text


_MOST_ID = 2**31


def _all(kind: type, what: str) -> BeforeValidator:
    """Return a check of a list's items that ends at the first wrong one; pydantic makes an error of each."""

    def check(value: Any) -> Any:
        if isinstance(value, list):
            if not set(map(type, value)) <= {kind}:
                raise ValueError(f"Input should be a list of {what}")
            if kind is int and value and not 0 <= min(value) <= max(value) <= _MOST_ID:
                raise ValueError(f"ids are 0 to {_MOST_ID:,}")
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_check_text)]
Texts = Annotated[list[Text], _all(str, "texts")]
Number = Annotated[float, Field(allow_inf_nan=False)]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=_MOST_ID)]], _all(int, "ids")]
ListsOfIds = Annotated[list[Ids], _all(list, "lists of ids")]


class Body(BaseModel):
    """A body in which unknown fields are errors, and values are not converted between types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class LooseBody(BaseModel):
    """A body of a foreign protocol: fields that we do not know are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


def body_of(settings: type, protocol: str, base: type[BaseModel]) -> type[BaseModel]:
    """Return a body with the options of a protocol: of those that are not given, the model's hold."""
    kinds = {float: Number, tuple[int, ...]: Ids, tuple[str, ...]: Texts}
    types, names = field_types(settings), option_names(settings, protocol)
    made: dict[str, Any] = {name: (kinds.get(types[name], types[name]) | None, None) for name in names}
    return create_model(settings.__name__, __base__=base, **made)


def option_names(settings: type, protocol: str) -> list[str]:
    """The options that a protocol has."""
    return [name for name, facts in facts_of(settings).items() if protocol in facts.http]


def given(body: BaseModel, settings: type, protocol: str) -> dict[str, Any]:
    """Return the options of a protocol that the client sent with a value other than null."""
    sent = {name: getattr(body, name) for name in option_names(settings, protocol)}
    return {
        name: tuple(value) if isinstance(value, list) else json.dumps(value) if isinstance(value, dict) else value
        for name, value in sent.items()
        if value is not None
    }


def finite(value: float) -> float | None:
    """Return a number for JSON, which has neither infinity nor NaN."""
    return value if math.isfinite(value) else None


STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
"""The types of `whole_or_events`, for the description of a route."""
_EVENTS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_AT_ONCE = 10_000
_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def large_answer(
    service: Service, request: Request, build: Callable[[], Any], size: int | None = None
) -> Response:
    """Return the answer with what a function returns. Args: size: see `Service.off_loop`."""
    check = partial(service.check_deadline, request)
    content = await service.off_loop(request, lambda: dump(build(), size, check).encode(), size)
    return Response(content, media_type="application/json")


async def whole_or_events(job: Any, is_streamed: bool | None) -> Response:
    """Return the `answer` of a job, or a stream of its `events`."""
    if is_streamed:
        return StreamingResponse(job.events(), media_type="text/event-stream", headers=_EVENTS)
    answer: Response = await job.answer()
    return answer


def server_event(data: Mapping[str, Any], event: str = "") -> str:
    """Return a server-sent event. Its data are ASCII, because some clients end a line at characters such as U+2028."""
    return f"{f'event: {event}{chr(10)}' if event else ''}data: {json.dumps(data)}\n\n"


def dump(value: Any, size: int | None = None, check: Callable[[], None] = lambda: None) -> str:
    """Return a value as JSON, written in parts unless it is small.

    One call of `json.dumps` for the whole value would hold the interpreter's lock all the time, even in a thread.

    Args: size: see `Service.off_loop`. check: called before each part; it may raise an error to end the work.
    """
    if is_few(size):
        return _plain(value)
    check()
    if isinstance(value, dict):
        return "{" + ",".join(f"{_plain(name)}:{dump(part, None, check)}" for name, part in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(part, list | dict) for part in value[:2]):
        return "[" + ",".join(dump(part, None, check) for part in value) + "]"
    if isinstance(value, list) and len(value) > _AT_ONCE:
        parts = (value[begin : begin + _AT_ONCE] for begin in range(0, len(value), _AT_ONCE))
        return "[" + ",".join(dump(part, None, check)[1:-1] for part in parts) + "]"
    return _plain(value)


B = TypeVar("B", bound=BaseModel)
_MOST_FIELDS = 1_000


def form_schema(body: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a request whose body `read_body` reads, for OpenAPI."""
    schema = body.model_json_schema()
    parts = schema.pop("$defs", {})

    def whole(value: Any) -> Any:
        """Put the parts where a schema refers to them: below a request their names would not be found."""
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            return whole(parts[name]) if name else {key: whole(one) for key, one in value.items()}
        return [whole(one) for one in value] if isinstance(value, list) else value

    schema = whole(schema)
    kinds = ("application/json", "application/x-www-form-urlencoded")
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}}


async def read_body(
    service: Service,
    request: Request,
    body_class: type[B],
    *,
    lists: tuple[str, ...] = (),
    numbers: tuple[str, ...] = (),
) -> B:
    """Return the body of a request, JSON or urlencoded.

    Args: lists: fields of a form that can be repeated. numbers: fields of a form that are whole numbers.

    Raises: Refusal: it is neither. RequestValidationError: it does not fit the class.
    """
    content = await request.body()
    values: Any
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/x-www-form-urlencoded":
        values = await service.off_loop(request, partial(_form, content, lists, numbers), len(content))
    else:
        try:
            values = json.loads(content or b"{}")
        except (ValueError, RecursionError):
            raise Refusal(400, "The body is not valid JSON.", code="json") from None
    try:
        return body_class.model_validate(values)
    except ValidationError as error:
        mistakes = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_input=False)]
        raise RequestValidationError(mistakes) from None


def _form(content: bytes, lists: tuple[str, ...], numbers: tuple[str, ...]) -> dict[str, Any]:
    try:
        text = content.decode("utf-8")  # curl sends non-ASCII letters unencoded
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise Refusal(400, "The body is not a valid form in UTF-8.", code="form") from None
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in lists:
            values.setdefault(name, []).append(value)
        elif name in numbers and value.isdecimal():
            values[name] = int(value[:12])
        else:
            values[name] = value
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in values.items()}


def translator_for(
    service: Service, name: str | None, source_lang: str | None, target_lang: str | None
) -> ServedTranslator:
    """Return the named model, or the first one for these languages; with neither, the first that translates.

    Raises: Refusal: no served model has this name or these languages, or the named one is known to have others.
    """
    if name is None and (source_lang or target_lang):
        wanted = [plain_tag(one) if one else None for one in (source_lang, target_lang)]
        for model in [one for one in service.models.values() if one.task == "translation"]:
            for source, target in model.pairs:
                if wanted[0] in (None, plain_tag(source)) and wanted[1] in (None, plain_tag(target)):
                    return model.into(target_lang or target)
        raise Refusal(
            422, "target_lang: no model here translates between these languages; GET /languages lists them.",
            code="language", field="target_lang",
        )  # fmt: skip
    model = find_model(service.models, name, ServedTranslator)
    chosen = model.into(target_lang)
    targets = (*model.reader.tokenizer.target_languages, *(target for _, target in model.pairs))
    if model.pairs and not (
        _has(source_lang, [source for source, _ in model.pairs]) and _has(target_lang, list(targets))
    ):
        raise Refusal(
            422, "target_lang: the named model does not translate between these languages; GET /v1/models lists them.",
            code="language", field="target_lang",
        )  # fmt: skip
    return chosen


def _has(wanted: str | None, languages: list[str]) -> bool:
    """Return whether a language is one of these, ignoring its region. True if no language is named."""
    return not wanted or plain_tag(wanted).partition("-")[0] in {plain_tag(one).partition("-")[0] for one in languages}


def nearest_translator(service: Service, source_lang: str | None, target_lang: str) -> tuple[ServedTranslator, str]:
    """Return the model for these languages, whose codes may have a region, and its source language.

    Raises: Refusal: there is none.
    """
    found = [
        (distance, model, source, target)
        for model in service.models.values()
        if model.task == "translation"
        for source, target in model.pairs
        if _FAR not in (distance := (_distance(target, target_lang), _distance(source, source_lang or source)))
    ]
    if found:
        _, model, source, target = min(found, key=lambda one: one[0])  # of equally near ones the first
        return model.into(target), source
    raise Refusal(
        400, "Value for 'target_lang' not supported. GET /v2/languages lists the languages of this server.",
        code="language", field="target_lang",
    )  # fmt: skip


def _distance(language: str, wanted: str) -> int:
    """Return 0 if a model's language is the wanted one, 1 if only one of them has a region, else _FAR."""
    own, asked = plain_tag(language), plain_tag(wanted)
    if own == asked:
        return 0
    return 1 if own == asked.partition("-")[0] or own.partition("-")[0] == asked else _FAR
