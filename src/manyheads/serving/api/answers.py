"""Answers that are large or are sent in parts.

Their JSON is built outside the event loop, which can answer other requests in the meantime.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi.responses import Response, StreamingResponse

from manyheads.serving.service import Service, is_few

__all__ = ["STREAMED", "dump", "large_answer", "server_event", "whole_or_events"]

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
"""The types of `whole_or_events`, for the description of a route."""
_EVENTS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def large_answer(service: Service, build: Callable[[], Any], size: int | None = None) -> Response:
    """Return the answer with what a function returns. Args: size: see `Service.off_loop`."""
    return Response(await service.off_loop(lambda: dump(build(), size).encode(), size), media_type="application/json")


async def whole_or_events(job: Any, is_streamed: bool | None) -> Response:
    """Return the `answer` of a job, or a stream of its `events`."""
    if is_streamed:
        return StreamingResponse(job.events(), media_type="text/event-stream", headers=_EVENTS)
    answer: Response = await job.answer()
    return answer


def server_event(data: Mapping[str, Any], event: str = "") -> str:
    """Return a server-sent event. Its data are ASCII, because some clients end a line at characters such as U+2028."""
    return f"{f'event: {event}{chr(10)}' if event else ''}data: {json.dumps(data)}\n\n"


def dump(value: Any, size: int | None = None) -> str:
    """Return a value as JSON, written in parts unless it is small.

    One call of `json.dumps` for the whole value would hold the interpreter's lock all the time, even in a thread.

    Args: size: see `Service.off_loop`.
    """
    if is_few(size):
        return _plain(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_plain(name)}:{dump(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(part, list | dict) for part in value[:2]):
        return "[" + ",".join(map(dump, value)) + "]"
    return _plain(value)
