"""Bodies in JSON or as a form, for protocols whose clients send either."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.service import Service

__all__ = ["form_schema", "read_body"]

B = TypeVar("B", bound=BaseModel)
_MOST_FIELDS = 1_000


def form_schema(body: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a request whose body `read_body` reads, for OpenAPI."""
    schema = body.model_json_schema()
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
