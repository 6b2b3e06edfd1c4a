"""The outermost layer of the application: it reads a request within limits before any other code sees it.

Order: framing and headers, Host and Origin, key, the size of the body, its arrival in time, its type, a slot. Only then
the request goes on, with its whole body in memory. If the client leaves, the request is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manyheads.errors import ConfigError
from manyheads.files.guarded import read_stream
from manyheads.serving.metrics import Metrics
from manyheads.serving.origins import Origins
from manyheads.serving.refusals import Refusal, error_body, status_of
from manyheads.serving.settings import ServingSettings

__all__ = ["ApiKeys", "Guard", "ServerState"]

_log = logging.getLogger("manyheads.serving.access")

MOST_HEADERS = 100
MOST_KEYS = 10_000
_MOST_BYTES_HELD = 1 << 26
_MOST_KEY_BYTES = 1 << 20
_OPEN_PATHS = ("/", "/healthz", "/readyz", "/health", "/docs", "/openapi.json")
_OPEN_PREFIXES = ("/static/",)
_HEALTH_PATHS = ("/healthz", "/readyz", "/health")
_ANSWERED_WHILE_LOADING = (*_OPEN_PATHS, "/metrics", "/version")
_KEY_IN_BODY = ("/translate", "/detect")
_WITHOUT_KEY = ("/languages", "/frontend/settings")  # LibreTranslate's clients ask them without one
_BODY_METHODS = ("POST", "PUT", "PATCH")
_BODY_TYPES = ("application/json", "application/x-www-form-urlencoded")
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


class ApiKeys:
    """The keys that clients may present; without keys every client is allowed.

    Args: keys: each at least 8 characters.
    """

    def __init__(self, keys: list[str]) -> None:
        self._keys = [key.encode() for key in keys]

    @classmethod
    def read(cls, path: str) -> ApiKeys:
        """Read one key per line; empty lines and lines that begin with # are ignored.

        A file of root may be readable by the group of another user's process.

        Raises: ConfigError: the file cannot be read, other users can read it, or it holds no usable key.
        """
        seen: list[os.stat_result] = []
        try:
            content = read_stream(Path(path), _MOST_KEY_BYTES, seen.append)
            if len(content) > _MOST_KEY_BYTES:
                raise ConfigError(f"the key file {path} has more than {_MOST_KEY_BYTES:,} bytes; give fewer keys.")
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"cannot read the key file {path}: {reason}.") from None
        [status] = seen
        if status.st_mode & _forbidden(status.st_uid):
            raise ConfigError(
                f"other users can read or write the key file {path} (mode {status.st_mode & 0o777:03o}); run chmod 600"
                f" {path}. A secret of Kubernetes needs defaultMode 0440, and fsGroup in the pod."
            )
        keys = [line.strip() for line in text.split("\n") if line.strip() and not line.startswith("#")]
        if not keys or len(keys) > MOST_KEYS or min(map(len, keys)) < 8:
            raise ConfigError(
                f"the key file {path} has {len(keys)} keys; give 1 to {MOST_KEYS:,} keys of at least 8 characters."
            )
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def allow(self, presented: str | None) -> bool:
        """Return whether this key is one of them. The time does not depend on which key it is or how much matches."""
        if not self._keys:
            return True
        given = (presented or "").encode("utf-8", "surrogatepass")
        return max([hmac.compare_digest(given, key) for key in self._keys])

    def in_headers(self, headers: MutableMapping[str, str]) -> str | None:
        """Return the key of `Authorization: Bearer KEY` or `Authorization: DeepL-Auth-Key KEY`, or of `X-API-Key`."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() in ("bearer", "deepl-auth-key"):
            return key.strip()
        return headers.get("x-api-key")


class ServerState:
    """The state of the server that the guard reads.

    Attributes:
        is_ready: all models are loaded. is_draining: the server stops soon: `/readyz` says so.
        is_closed: new requests are refused. num_requests: requests that hold a slot.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.is_draining = False
        self.is_closed = False
        self.num_requests = 0


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
        exchange = _Exchange(scope, send, self._state)
        try:
            headers = self._check_head(scope)
            exchange.more += self._origins.headers(headers)
            if (found := self._origins.preflight(scope["method"], headers)) is not None:
                await exchange.answer(204, found)
                return
            self._check_key(scope, headers)
            self._check_open(scope)
            body = await self._read_body(scope, headers, receive)
            scope["manyheads.body"] = body
            with self._slot(scope):
                await _run_until_gone(self._app, scope, body, receive, exchange.send)
        except Refusal as refusal:
            if not exchange.status:
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
        """Raises: Refusal: the path needs a key, and the headers have none that is valid."""
        path = scope["path"]
        is_open = path in (*_OPEN_PATHS, *_KEY_IN_BODY, *_WITHOUT_KEY) or path.startswith(_OPEN_PREFIXES)
        if not is_open and not self._keys.allow(self._keys.in_headers(headers)):
            status = 403 if path.startswith("/v2/") else 401
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
        if self._state.num_requests >= self._settings.max_requests:
            raise self._rejected(
                "queue",
                429,
                f"The server has {self._settings.max_requests} requests already; try again later.",
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
        self._state.num_requests += 1
        try:
            yield
        finally:
            self._state.num_requests -= 1

    async def _read_body(self, scope: Scope, headers: dict[str, str], receive: Receive) -> bytes:
        """Return the whole body. Raises: Refusal: it is too large, of a wrong type, or too slow."""
        limit = self._settings.max_body_bytes
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > limit:
            raise self._too_large(limit)
        if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise Refusal(
                415, "Compressed bodies are not supported; send the body as it is.", code="encoding", close=True
            )
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.read_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _gone()
                    part = message.get("body", b"")
                    self._bytes_held += len(part)
                    body += part
                    if len(body) > limit:
                        raise self._too_large(limit)
                    if self._bytes_held > max(_MOST_BYTES_HELD, limit):
                        raise self._rejected(
                            "queue",
                            429,
                            "Too many bodies arrive at the same time; try again later.",
                            code="queue_full",
                            retry_after=1,
                            close=True,
                        )
                    more = message.get("more_body", False)
        except TimeoutError:
            raise self._rejected(
                "slow_body",
                408,
                f"The body did not arrive within {self._settings.read_seconds:g} s.",
                code="slow_body",
                close=True,
            ) from None
        finally:
            self._bytes_held -= len(body)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and scope["method"] in _BODY_METHODS and kind not in _BODY_TYPES:
            raise Refusal(
                415, f"The type of the body is not supported; send {' or '.join(_BODY_TYPES)}.", code="content_type"
            )
        return bytes(body)

    def _too_large(self, limit: int) -> Refusal:
        message = f"The body is larger than {limit:,} bytes; send fewer or shorter texts."
        return self._rejected("body_size", 413, message, code="body_size", close=True)

    def _rejected(self, reason: str, status: int, message: str, **more: Any) -> Refusal:
        """Count a refusal, and return it. reason: one of `Metrics.REASONS`. more: see `Refusal`."""
        self._metrics.rejected.add(value=reason)
        return Refusal(status, message, **more)


class _Exchange:
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


async def _run_until_gone(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
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
        raise _gone() from None
    finally:
        is_over = True
        watching.cancel()


def _gone() -> Refusal:
    return Refusal(499, "The client closed the connection.", code="gone", close=True)


def _may_have_body(scope: Scope) -> bool:
    """Whether a body follows that was not read, so that the connection cannot be used again."""
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _forbidden(owner: int) -> int:
    """Return the permissions that a key file of this owner must not give; none where there are no such permissions.

    A secret that Kubernetes mounts belongs to root, and other users' processes can read it by their group alone.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return 0
    return 0o037 if owner == 0 and os.geteuid() != 0 else 0o077


def _name(host: str) -> str:
    """Return the Host header, or the name of a host, without its port and in lower case."""
    name, _, port = host.lower().rpartition(":")
    return name if name and port.isdecimal() else host.lower()
