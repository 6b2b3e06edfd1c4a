"""The outermost layer of the application: it reads a request within limits before any other code sees it.

`Exchange` is one request and its answer: headers of the answer, the log. Clients can leave at any time.

Order: framing and headers, Host and Origin, key, the size of the body, its arrival in time, its type, a slot. Only then
the request goes on, with its whole body in memory. If the client leaves, the request is cancelled. After a refusal the
rest of the body is read and not kept, within its deadline: see `Arriving.discard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manyheads.extras.serving.engine import SHARE_KEPT
from manyheads.extras.serving.glossaries import MOST_BODY_BYTES, MOST_BYTES
from manyheads.extras.serving.refusals import Refusal, check_shape, error_body, protocol_of, status_of

if TYPE_CHECKING:
    from manyheads.extras.serving.engine import Metrics
    from manyheads.extras.serving.settings import ApiKeys, ServingSettings


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


Headers = list[tuple[bytes, bytes]]


class Origins:
    """The origins that are allowed besides the server's own.

    Args: allowed: such as `https://example.org`; upper case and a slash at the end do not matter.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(one.strip().rstrip("/").lower() for one in allowed)

    def allow(self, origin: str) -> bool:
        """Return whether an Origin header is one of them."""
        return origin.lower() in self._allowed

    def headers(self, headers: Mapping[str, str]) -> Headers:
        """Return what an answer needs, so that the browser shows it to the page that asked."""
        origin = headers.get("origin", "")
        if not self.allow(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"retry-after, x-request-id"),
            (b"vary", b"origin"),
        ]

    def preflight(self, method: str, headers: Mapping[str, str]) -> Headers | None:
        """Return the headers of the answer to a preflight request of a browser; None: it is no preflight request.

        A preflight request has no key; the request after it has.
        """
        if method != "OPTIONS" or "access-control-request-method" not in headers or not self.headers(headers):
            return None
        asked = headers.get("access-control-request-headers", "")
        return [
            (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
            (b"access-control-allow-headers", asked.encode("latin-1")),
            (b"access-control-max-age", b"600"),
        ]


MOST_HEADERS = 100
_MOST_BYTES_HELD = 1 << 26
_OPEN_PATHS = ("/", "/healthz", "/readyz", "/health", "/docs", "/openapi.json")
_OPEN_PREFIXES = ("/static/",)
_HEALTH_PATHS = ("/healthz", "/readyz", "/health")
_ANSWERED_WHILE_LOADING = (*_OPEN_PATHS, "/metrics", "/version")
_KEY_IN_BODY = ("/translate", "/detect")
_WITHOUT_KEY = ("/languages", "/frontend/settings")  # LibreTranslate's clients ask them without one
_BODY_METHODS = ("POST", "PUT", "PATCH")
_BODY_TYPES = ("application/json", "application/x-www-form-urlencoded")
_DOCUMENTS = "/v2/document"
_GLOSSARIES = ("/v2/glossaries", "/v3/glossaries")
_CLOSED_AT_ONCE = ("framing", "headers", "slow_body")
"""Refusals whose body is not read to its end: where it ends is doubtful, or it was too slow already."""
_MOST_FIELD_BYTES = 1 << 21
"""Of the fields beside a document: terms of 1 MB, and the rest."""


class Guard:
    """See the module. Sends refusals itself, and adds a request id and security headers to every answer.

    Args: app: the application; settings: limits; state: of the server; keys: of clients; metrics: counts refusals.
    """

    def __init__(
        self, app: ASGIApp, *, settings: ServingSettings, state: ServerState, keys: ApiKeys, metrics: Metrics
    ) -> None:
        self._app = app
        self._settings = settings
        self._state = state
        self._keys = keys
        self._metrics = metrics
        self._hosts = frozenset(map(_name, settings.allowed_hosts))
        self._origins = Origins(settings.allowed_origins)
        self._bytes_held = 0  # of bodies that are arriving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, send, self._state)
        arriving = Arriving(receive, scope["headers"])
        try:
            headers = self._check_head(scope)
            exchange.more += self._origins.headers(headers)
            if (found := self._origins.preflight(scope["method"], headers)) is not None:
                await exchange.answer(204, found)
                return
            self._check_key(scope, headers)
            self._check_open(scope)
            body = await self._read_body(scope, headers, arriving)
            scope["manyheads.body"] = body
            with self._slot(scope):
                if "json" in headers.get("content-type", ""):
                    check_shape(body, self._settings)
                await run_until_gone(self._app, scope, body, receive, exchange.send)
        except Refusal as refusal:
            if not exchange.status:
                if refusal.code not in _CLOSED_AT_ONCE:
                    await arriving.discard(self._body_seconds(scope["path"]))
                await exchange.refuse(refusal)
        except Exception as error:
            _log.error("request %s failed: %s", exchange.id, type(error).__name__, exc_info=error)
            if exchange.status:
                raise  # the answer has begun: the connection must be closed in its middle
            await exchange.refuse(Refusal(500, f"The server failed; its log has request {exchange.id}.", code="bug"))
        finally:
            exchange.log(as_json=self._settings.json_logs)

    def _check_head(self, scope: Scope) -> dict[str, str]:
        """Return the headers. Raises: Refusal: the head of the request is not acceptable."""
        pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(pairs)
        if len(pairs) > MOST_HEADERS:
            raise self._rejected(
                "invalid",
                431,
                f"The request has {len(pairs)} headers; at most {MOST_HEADERS} are allowed.",
                code="headers",
                close=True,
            )
        names = [name for name, _ in pairs]
        if ("transfer-encoding" in headers and "content-length" in headers) or names.count("host") > 1:
            raise self._rejected(
                "invalid",
                400,
                "The request has both Content-Length and Transfer-Encoding, or several Host headers.",
                code="framing",
                close=True,
            )
        self._check_host(scope, headers)
        return headers

    def _check_key(self, scope: Scope, headers: dict[str, str]) -> None:
        """Note the client: its key, or its address.

        Raises: Refusal: the path needs a key, and the headers have none that is valid.
        """
        path = scope["path"]
        address = scope.get("client")
        presented = self._keys.in_headers(headers)
        is_allowed = not self._keys or (presented is not None and self._keys.allow(presented))
        scope["manyheads.client"] = presented if self._keys and is_allowed else address and address[0]
        is_open = path in (*_OPEN_PATHS, *_KEY_IN_BODY, *_WITHOUT_KEY) or path.startswith(_OPEN_PREFIXES)
        if not is_open and not is_allowed:
            status = 403 if protocol_of(path) == "deepl" else 401
            raise self._rejected(
                "key",
                status,
                "This server needs a key: send Authorization: Bearer KEY.",
                code="key",
                close=scope["method"] in _BODY_METHODS,
            )

    def _check_host(self, scope: Scope, headers: dict[str, str]) -> None:
        """Protect against DNS rebinding and against requests that other sites make in a user's browser.

        Probes of Kubernetes name the address of the pod, which nobody knows beforehand; that the server is well is no
        secret.
        """
        host = headers.get("host", "")
        is_probe = scope["path"] in _HEALTH_PATHS and scope["method"] in ("GET", "HEAD")
        if not is_probe and "*" not in self._hosts and _name(host) not in self._hosts:
            raise self._rejected(
                "host",
                421,
                "The Host header does not name this server; start it with --allowed-host NAME to permit the name.",
                code="host",
                close=True,
            )
        origin = headers.get("origin")
        if origin is None or self._origins.allow(origin):
            return
        try:
            is_own = urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            is_own = False
        if not is_own:
            raise self._rejected(
                "host",
                403,
                "Pages of other origins may not use this server; start it with --allowed-origin to permit one.",
                code="origin",
                close=True,
            )

    def _check_open(self, scope: Scope) -> None:
        """Refuse early what would be refused after its body was read. Raises: Refusal: see `_slot`."""
        is_work, path = scope["method"] in _BODY_METHODS, scope["path"]
        is_always = path in _ANSWERED_WHILE_LOADING or path.startswith(_OPEN_PREFIXES)
        if not self._state.is_ready and (is_work or not is_always):
            raise self._rejected(
                "loading",
                503,
                "The server is loading its models; try again soon.",
                code="loading",
                retry_after=1,
                close=_may_have_body(scope),
            )
        if not is_work:
            return
        if self._state.is_closed:
            raise self._rejected("draining", 503, "The server is stopping.", code="draining", retry_after=5, close=True)
        most = self._settings.max_requests
        if self._state.clients[scope["manyheads.client"]]:
            most -= most // SHARE_KEPT
        if self._state.num_requests >= most:
            raise self._rejected(
                "queue",
                429,
                f"The server has {self._state.num_requests} requests already; try again later.",
                code="queue_full",
                retry_after=1,
                close=_may_have_body(scope),
            )

    @contextlib.contextmanager
    def _slot(self, scope: Scope) -> Iterator[None]:
        """Hold one of the server's slots. Raises: Refusal: all are taken, or the server is stopping.

        It is taken after the body has arrived, so that slow clients hold none, and before anything is parsed.
        """
        if scope["method"] not in _BODY_METHODS:  # cheap; they must work under any load
            yield
            return
        self._check_open(scope)
        clients, client = self._state.clients, scope["manyheads.client"]
        self._state.num_requests += 1
        clients[client] += 1
        try:
            yield
        finally:
            self._state.num_requests -= 1
            clients[client] -= 1
            if not clients[client]:
                del clients[client]

    async def _read_body(self, scope: Scope, headers: dict[str, str], arriving: Arriving) -> bytes:
        """Return the whole body. Raises: Refusal: it is too large, of a wrong type, or too slow."""
        path = scope["path"]
        limit, types = self._limits(path)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > limit:
            raise self._too_large(path, limit)
        if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise Refusal(
                415, "Compressed bodies are not supported; send the body as it is.", code="encoding", close=True
            )
        body = bytearray()
        seconds = self._body_seconds(path)
        try:
            async with asyncio.timeout(seconds):
                while not arriving.is_whole:
                    part = await arriving.part()
                    self._bytes_held += len(part)
                    body += part
                    if len(body) > limit:
                        raise self._too_large(path, limit)
                    if self._bytes_held > max(_MOST_BYTES_HELD, limit):
                        raise self._rejected(
                            "queue",
                            429,
                            "Too many bodies arrive at the same time; try again later.",
                            code="queue_full",
                            retry_after=1,
                            close=True,
                        )
        except TimeoutError:
            raise self._rejected(
                "slow_body",
                408,
                f"The body did not arrive within {seconds:g} s.",
                code="slow_body",
                close=True,
            ) from None
        finally:
            self._bytes_held -= len(body)
            if not arriving.is_whole:
                body.clear()  # the refusal refers to it until it is answered
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and scope["method"] in _BODY_METHODS and kind not in types:
            raise Refusal(
                415, f"The type of the body is not supported; send {' or '.join(types)}.", code="content_type"
            )
        return bytes(body)

    def _limits(self, path: str) -> tuple[int, tuple[str, ...]]:
        """Return how many bytes a body may have on this path, and which types."""
        limit = self._settings.max_body_bytes
        if path == _DOCUMENTS:
            return max(limit, self._settings.max_document_bytes + _MOST_FIELD_BYTES), ("multipart/form-data",)
        if self._settings.glossaries and path.startswith(_GLOSSARIES):
            limit = max(limit, MOST_BODY_BYTES)
        return limit, _BODY_TYPES

    def _body_seconds(self, path: str) -> float:
        """Return how long a body may arrive; large ones get as much time as others for each byte."""
        return self._settings.read_seconds * max(1.0, self._limits(path)[0] / self._settings.max_body_bytes)

    def _too_large(self, path: str, limit: int) -> Refusal:
        """Return the refusal of a body, by what it holds: texts, a document, or a glossary."""
        field, what, most = None, "", 0
        if path == _DOCUMENTS:
            field, what, most = "file", "a document", self._settings.max_document_bytes
        elif self._settings.glossaries and path.startswith(_GLOSSARIES):
            field, what, most = "entries", "the terms of a glossary", MOST_BYTES
        told = f"The body is larger than {limit:,} bytes; send fewer or shorter texts."
        if field is not None:
            told = f"{field}: the body is larger than {limit:,} bytes; the limit of {what} is {most:,}. Divide it."
        return self._rejected("body_size", 413, told, code="body_size", field=field, close=True)

    def _rejected(self, reason: str, status: int, message: str, **more: Any) -> Refusal:
        """Count a refusal, and return it. reason: one of `Metrics.REASONS`. more: see `Refusal`."""
        self._metrics.rejected[reason].inc()
        return Refusal(status, message, **more)


def _may_have_body(scope: Scope) -> bool:
    """Whether a body follows that was not read, so that the connection cannot be used again."""
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _name(host: str) -> str:
    """Return the Host header, or the name of a host, without its port and in lower case."""
    name, _, port = host.lower().rpartition(":")
    return name if name and port.isdecimal() else host.lower()
