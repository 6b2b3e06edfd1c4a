"""Connections with deadlines: slow, idle and stuck clients are disconnected, whatever they do.

uvicorn has no deadline for the header of a request, none for a client that stops reading, and no limit per address:
eight half-open connections could lock everybody out (with `--limit-concurrency 8`), for ever.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from manyheads.serving.settings import ServingSettings

__all__ = ["GuardedConnection", "Register", "connection_class"]

MOST_HEADER_BYTES = 1 << 16


class Register:
    """All open connections, by address, oldest first.

    When a limit is reached, the oldest connection that is not within a request is closed to make room. So slow
    connections never lock out a client that sends a request.

    Args: most: of all addresses. most_per_address: of one.
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._all: OrderedDict[GuardedConnection, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[GuardedConnection, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: GuardedConnection) -> bool:
        """Add a connection. Returns: whether there is room for it."""
        own = self._by_address.setdefault(connection.address, OrderedDict())
        for group, most in ((own, self._most_per_address), (self._all, self._most)):
            if len(group) >= most:
                idle = next((other for other in group if other.is_idle), None)
                if idle is None:
                    self._forget_if_empty(connection.address)
                    return False
                self.remove(idle)
                idle.close()
        self._all[connection] = None
        self._by_address.setdefault(connection.address, own)[connection] = None
        return True

    def remove(self, connection: GuardedConnection) -> None:
        """Remove a connection that was closed; nothing happens if it is not there."""
        self._all.pop(connection, None)
        self._by_address.get(connection.address, OrderedDict()).pop(connection, None)
        self._forget_if_empty(connection.address)

    def _forget_if_empty(self, address: str) -> None:
        if not self._by_address.get(address, True):
            del self._by_address[address]


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
        self.address = self.client[0] if self.client else ""
        self._header_timer: asyncio.TimerHandle | None = None
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
        if self._header_timer is not None:
            self._header_timer.cancel()
        if not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.settings.read_seconds, self._header_expired)

    def _header_expired(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.close()


def connection_class(settings: ServingSettings) -> type[GuardedConnection]:
    """Return the class of a server's connections, which uvicorn makes."""

    class Connection(GuardedConnection):
        def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any) -> None:
            super().__init__(config, server_state, app_state, _loop)

    Connection.settings = settings
    Connection.register = Register(settings.max_connections, settings.max_connections_per_address)
    return Connection
