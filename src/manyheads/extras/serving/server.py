"""Running the application with uvicorn: a bound socket, connections with deadlines, and a clean end."""

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
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from manyheads.errors import ConfigError
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.connections import MOST_HEADER_BYTES, connection_class
from manyheads.extras.serving.service import Service
from manyheads.extras.serving.settings import ServingSettings

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


def serve(settings: ServingSettings, host: str, port: int, when_ready: Callable[[str], None]) -> int:
    """Serve until a signal arrives. Returns: the exit code.

    Args: when_ready: called with the address when requests can be sent.

    Raises: ManyHeadsError: the address cannot be used, or a model cannot be loaded.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the guard logs what fails
    app = build_app(settings, loads=False)
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
