"""Answers in JSON that can be large: built and written outside the event loop, which answers others meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi.responses import Response

from manyheads.serving.service import Service

__all__ = ["dump", "large_answer"]

_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def large_answer(service: Service, build: Callable[[], Any]) -> Response:
    """Return the answer with what a function returns."""
    return Response(await service.off_loop(lambda: dump(build()).encode()), media_type="application/json")


def dump(value: Any) -> str:
    """Return a value as JSON, written in parts.

    The whole in one call of `json.dumps` would keep the interpreter's lock for as long as it takes, also in a thread.
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{_plain(name)}:{dump(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(part, list | dict) for part in value[:2]):
        return "[" + ",".join(map(dump, value)) + "]"
    return _plain(value)
