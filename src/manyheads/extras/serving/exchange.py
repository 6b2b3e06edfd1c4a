"""One request and its answer, as the guard handles them: headers of the answer, the log, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manyheads.extras.serving.refusals import Refusal, error_body, status_of

_log = logging.getLogger("manyheads.extras.serving.access")

_MOST_BYTES_DISCARDED = 1 << 28
_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
]
_PAGE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class ServerState:
    """The state of the server that the guard reads.

    Attributes:
        is_ready: all models are loaded. is_draining: the server stops soon: `/readyz` says so.
        is_closed: new requests are refused. num_requests: requests that hold a slot. clients: the same of each client.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.is_draining = False
        self.is_closed = False
        self.num_requests = 0
        self.clients = Counter[Any]()


class Exchange:
    """One request and its answer: adds headers to the answer, and writes a line to the log.

    Attributes: more: headers of the answer to a page of another origin.
    """

    def __init__(self, scope: Scope, send: Send, state: ServerState) -> None:
        self._scope, self._send, self._state = scope, send, state
        self._arrived = time.monotonic()
        self.status = 0
        self.more: list[tuple[bytes, bytes]] = []
        self.id = secrets.token_hex(8)
        scope["manyheads.id"], scope["manyheads.arrived"] = self.id, self._arrived

    async def send(self, message: Message) -> None:
        """Send a message of the application, with more headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = dict(message.get("headers", []))
            defaults = {b"content-security-policy": _PAGE_POLICY, b"cache-control": b"no-store"}
            if self._state.is_draining:
                defaults[b"connection"] = b"close"  # so that clients open their next connection elsewhere
            always = [*_SECURITY_HEADERS, *self.more, (b"x-request-id", self.id.encode())]
            missing = [(name, value) for name, value in defaults.items() if name not in own]
            message = {**message, "headers": [*message.get("headers", []), *always, *missing]}
        await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error."""
        path = self._scope["path"]
        body = json.dumps(error_body(path, refusal)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers()}
        await self.answer(
            status_of(path, refusal), [(name.encode(), value.encode()) for name, value in headers.items()], body
        )

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> None:
        """Answer without the application."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    def log(self, *, as_json: bool) -> None:
        """Write one line: no texts, and of the path only what is known to be one of ours."""
        milliseconds = round((time.monotonic() - self._arrived) * 1000, 1)
        route = getattr(self._scope.get("route"), "path", "-")
        status = self.status or 499
        if as_json:
            record = {"request": self.id, "method": self._scope["method"][:10], "path": route, "status": status,
                      "milliseconds": milliseconds}  # fmt: skip
            _log.info("%s", json.dumps(record))
        else:
            _log.info("%s %s %s %d %.1f ms", self.id, self._scope["method"][:10], route, status, milliseconds)


class Arriving:
    """The body of a request while it arrives.

    Args: receive: of ASGI. headers: of the request.

    Attributes: is_whole: nothing follows any more.
    """

    def __init__(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]]) -> None:
        found = dict(headers)
        length = found.get(b"content-length", b"0")
        self._receive = receive
        self._length = int(length[:20]) if length.isdigit() else 0
        self._is_sent = b"expect" not in found  # such a client sends its body after the first call of `part`
        self.is_whole = False

    async def part(self) -> bytes:
        """Return the next part. Raises: Refusal: the client has left."""
        self._is_sent = True
        message = await self._receive()
        self.is_whole = not message.get("more_body", False)
        if message["type"] == "http.disconnect":
            raise client_gone()
        return bytes(message.get("body", b""))

    async def discard(self, seconds: float) -> None:
        """Read the rest and keep nothing of it, so that the client receives the answer.

        Proxies, and most clients over TLS, look for an answer only after they have sent everything. If the connection
        is closed before, they report that instead. A body that is larger than `_MOST_BYTES_DISCARDED`, or takes longer
        than this time, is not read to its end.
        """
        left = _MOST_BYTES_DISCARDED
        if not self._is_sent or self._length > left:
            return
        with contextlib.suppress(TimeoutError, Refusal):
            async with asyncio.timeout(seconds):
                while not self.is_whole and left > 0:
                    left -= len(await self.part())


async def run_until_gone(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run the application with the complete body; cancel it when the client disconnects."""
    gone = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    is_read = is_over = False

    async def replay() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        if not is_over:
            task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        await app(scope, replay, send)
    except asyncio.CancelledError:
        if not gone.is_set() or task.uncancel():
            raise  # the server cancels the request
        raise client_gone() from None
    finally:
        is_over = True
        watching.cancel()


def client_gone() -> Refusal:
    """Return the end of a request whose client has left; nobody receives it."""
    return Refusal(499, "The client closed the connection.", code="gone", close=True)
