"""Answers that are large or are sent in parts.

Their JSON is built outside the event loop, which can answer other requests in the meantime.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from manyheads.extras.serving.service import Service, is_few

__all__ = ["STREAMED", "dump", "large_answer", "server_event", "whole_or_events"]

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
