"""Running the application with uvicorn: a bound socket, connections with deadlines, and a clean end.

Slow, idle and stuck clients are always disconnected: uvicorn has no deadline for the header of a request, none for a
client that stops reading, and no limit per address: with `--limit-concurrency 8`, eight half-open connections would
block all other clients forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.extras.serving.service import Service
    from manyheads.extras.serving.settings import ServingSettings

MOST_HEADER_BYTES = 1 << 16
_MOST_GATHERED = 1 << 14


class _Group:
    """Connections that share a limit: those that never had a complete request, oldest first, and the others, the one
    that was not used for the longest time first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._new: OrderedDict[GuardedConnection, None] = OrderedDict()
        self._known: OrderedDict[GuardedConnection, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._new) + len(self._known)

    def __contains__(self, connection: object) -> bool:
        return connection in self._new or connection in self._known

    def add(self, connection: GuardedConnection) -> None:
        self._new[connection] = None

    def use(self, connection: GuardedConnection) -> None:
        self.remove(connection)
        self._known[connection] = None

    def remove(self, connection: GuardedConnection) -> None:
        self._new.pop(connection, None)
        self._known.pop(connection, None)

    @property
    def is_full(self) -> bool:
        return len(self) >= self._most

    def least_useful(self) -> GuardedConnection | None:
        """Return the connection to close: a new one if new ones are at least half of all; None: all are answering
        requests."""
        pools = (self._new, self._known)
        ordered = pools if 2 * len(self._new) >= self._most else reversed(pools)
        return next((one for pool in ordered for one in pool if one.is_idle), None)


class Register:
    """All open connections, by address.

    When a limit is reached, a connection that is not within a request is closed to make room (see `_Group`). So slow
    connections never lock out a client that sends a request, and many new ones do not close those of a client that
    keeps its connection between requests.

    Args: most: of all addresses. most_per_address: of one.
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most_per_address = most_per_address
        self._all = _Group(most)
        self._by_address: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: GuardedConnection) -> bool:
        """Add a connection. Returns: whether there is room for it."""
        own = self._by_address.get(connection.address) or _Group(self._most_per_address)
        for group in (own, self._all):
            if group.is_full:
                idle = group.least_useful()
                if idle is None:
                    return False
                self.remove(idle)
                idle.close()
        self._all.add(connection)
        self._by_address.setdefault(connection.address, own).add(connection)
        return True

    def use(self, connection: GuardedConnection) -> None:
        """Note that a request of this connection was answered; nothing happens if it was removed."""
        own = self._by_address.get(connection.address)
        if own is not None and connection in own:
            own.use(connection)
            self._all.use(connection)

    def remove(self, connection: GuardedConnection) -> None:
        """Remove a connection that was closed; nothing happens if it is not there."""
        self._all.remove(connection)
        own = self._by_address.get(connection.address)
        if own is not None:
            own.remove(connection)
            if not own:
                del self._by_address[connection.address]


class GatheredTransport:
    """A transport that sends what is written in one turn of the event loop together.

    uvicorn writes the head, the body and the end of an answer separately. Each would be a system call and would wake
    the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if data and not self._held:
            self._loop.call_soon(self._flush)
        self._held += data
        if len(self._held) > _MOST_GATHERED:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._flush()
        self._transport.abort()

    def _flush(self) -> None:
        if self._held and not self._transport.is_closing():
            self._transport.write(bytes(self._held))
        self._held.clear()


class GuardedConnection(H11Protocol):
    """One connection.

    - A header must arrive within `read_seconds` of the connection, or of the end of the answer before it.
    - A client must read its answer: if it takes no byte for `write_seconds`, the connection is aborted.

    The deadline of the body is the guard's (see `guard.Guard`), which answers 408.
    """

    settings: ServingSettings
    register: Register

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        super().connection_made(transport)
        self.transport = GatheredTransport(transport, self.loop)  # type: ignore[assignment]
        self.address = self.client[0] if self.client else ""
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_end = 0.0
        self._write_timer: asyncio.TimerHandle | None = None
        if not self.register.add(self):
            self.close()
            return
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self.register.remove(self)
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether no request has arrived completely, so that closing loses no work."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def close(self) -> None:
        """Close without waiting for the client."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # bad framing after the answer has begun: no answer can be sent any more
            self.close()

    def on_response_complete(self) -> None:
        """Called at the end of each answer."""
        super().on_response_complete()
        self.register.use(self)
        self._await_header()

    def pause_writing(self) -> None:
        """Called by asyncio when the client does not read as fast as we write."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.settings.write_seconds, self.close)

    def resume_writing(self) -> None:
        """Called by asyncio when the client has read."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _await_header(self) -> None:
        """Set the deadline.

        A running timer is not restarted; if it ends before the deadline it is set again. Answers are too frequent to
        restart it for each.
        """
        self._header_end = self.loop.time() + self.settings.read_seconds
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_at(self._header_end, self._header_expired)

    def _header_expired(self) -> None:
        self._header_timer = None
        if self.cycle is None or self.cycle.response_complete:
            if self.loop.time() >= self._header_end:
                self.close()
            else:
                self._header_timer = self.loop.call_at(self._header_end, self._header_expired)


def connection_class(settings: ServingSettings) -> type[GuardedConnection]:
    """Return the class of a server's connections, which uvicorn makes."""

    class Connection(GuardedConnection):
        def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any) -> None:
            super().__init__(config, server_state, app_state, _loop)

    Connection.settings = settings
    Connection.register = Register(settings.max_connections, settings.max_connections_per_address)
    return Connection


_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 16
"""Connections that the event loop accepts before it reads what has arrived on those that it has."""
_DRAIN_MARGIN = 5.0
_SWITCH_SECONDS = 0.001


class Server(uvicorn.Server):
    """A server that accepts connections while the models are loaded, and ends in order.

    Until the models are loaded, `/readyz` and requests for work are answered with 503.

    SIGTERM: `/readyz` says 503 and answers say `Connection: close`; after `drain_delay_seconds` no connection is
    accepted any more, accepted requests are finished, and the process ends with code 0. SIGINT: the same without delay,
    and code 130. A second signal ends at once; the code is that of the first.

    Args: app: of `build_app` with loads=False. settings: see there. when_ready: called when requests can be sent.

    Attributes: failure: why the models could not be loaded; the server has then ended.
    """

    def __init__(self, app: FastAPI, settings: ServingSettings, when_ready: Callable[[], None] | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=connection_class(settings),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(settings.read_seconds)),
            timeout_graceful_shutdown=round(settings.deadline_seconds + _DRAIN_MARGIN),
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            backlog=_ACCEPTED_AT_ONCE,
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._settings = settings
        self._when_ready = when_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self.received: signal.Signals | None = None
        self.failure: Exception | None = None
        self._loading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to load the models."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        # For asyncio one number is both the length of the queue and how many connections it accepts at once.
        for listening in sockets or ():
            listening.listen(_BACKLOG)
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            if not self._service.state.is_ready:
                await self._service.load()
            if self._when_ready is not None and self._service.state.is_ready:
                self._when_ready()
        except Exception as error:
            self.failure = error
            self._end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what was accepted."""
        if not self._service.state.is_ready:
            self._service.state.is_closed = True  # loading stops before the next model
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for a signal."""
        if self.received is not None:
            if not self._service.state.is_ready:
                # The thread that loads a model cannot be interrupted, and an ordinary end would wait for it.
                os.write(2, b"manyheads: stopped while the models were being loaded\n")
                os._exit(_code_of(self.received))
            self.force_exit = self.should_exit = True
            return
        self.received = signal.Signals(sig)
        if self._loop is None:
            sys.exit(_code_of(self.received))
        is_gentle = sig == signal.SIGTERM and self._service.state.is_ready  # while loading nothing is accepted
        delay = self._settings.drain_delay_seconds if is_gentle else 0.0
        self._loop.call_soon_threadsafe(self._drain, delay)

    def _drain(self, delay: float) -> None:
        self._service.state.is_draining = True
        assert self._loop is not None
        self._loop.call_later(delay, self._end)

    def _end(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; unlike uvicorn's, it does not raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, self.handle_exit) for one in handled}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet.

    Args: port: 0: any free one.

    Raises: ConfigError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, UnicodeError):  # a part of the name is empty or too long
            reason = "this is no name of a host"
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {reason}; choose another address with --host and --port."
        ) from None
    return bound


def serve(app: FastAPI, settings: ServingSettings, host: str, port: int, when_ready: Callable[[str], None]) -> int:
    """Serve until a signal arrives. Returns: the exit code.

    Args: app, settings: see `Server`. when_ready: called with the address when requests can be sent.

    Raises: ManyHeadsError: the address cannot be used, or a model cannot be loaded.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the guard logs what fails
    with contextlib.closing(bind(host, port)) as bound:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{bound.getsockname()[1]}"

        def loaded() -> None:
            _shorten_pauses()
            when_ready(address)

        server = Server(app, settings, loaded)
        server.run(sockets=[bound])
    if server.failure is not None:
        raise server.failure
    return _code_of(server.received)


def _code_of(received: signal.Signals | None) -> int:
    """Return the exit code after a first signal."""
    return 130 if received is signal.SIGINT else 0


def _shorten_pauses() -> None:
    """Let the event loop run soon while the model's thread computes.

    A thread that waits for the interpreter's lock gets it after a switch interval, 5 ms by default; a request needs it
    several times. Garbage collection holds the lock while it traverses all objects, so the permanent objects of loaded
    packages and models are excluded from it.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
