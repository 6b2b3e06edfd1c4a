"""Which connections give way when there are too many."""

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from serving_sockets import answer_of, connect, is_healthy, request, running

from manyheads.extras.serving.server import Register, Server
from manyheads.extras.serving.settings import ServingSettings

BODY = b'{"text": "I am hungry."}'


@pytest.fixture(scope="module")
def limited(settings: ServingSettings) -> Iterator[tuple[Server, int]]:
    with running(replace(settings, read_seconds=2, max_connections_per_address=64)) as found:
        yield found


def test_half_open_connections_lock_nobody_out(limited: tuple[Server, int]) -> None:
    server, port = limited
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(port)) for _ in range(100)]
        for number, opened in enumerate(held):
            rest = b"Content-Length: 9\r\n\r\n" if number % 2 else b""
            with contextlib.suppress(OSError):
                opened.sendall(b"POST /v1/translate HTTP/1.1\r\nHost: 127.0.0.1\r\n" + rest)
        for _ in range(5):
            assert is_healthy(port)
        body = b'{"text": "I am hungry."}'
        assert answer_of(port, request("/v1/translate", body, "Connection: close")).startswith(b"HTTP/1.1 200")
    deadline = time.monotonic() + 10
    while server.server_state.connections and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server.server_state.connections


def pause(server: Server, seconds: float) -> None:
    """Keep the event loop busy, so that what arrives meanwhile arrives at once."""
    server._loop.call_soon_threadsafe(time.sleep, seconds)


def burst(stack: contextlib.ExitStack, port: int, count: int) -> None:
    for _ in range(count):
        opened = stack.enter_context(socket.socket())
        opened.setblocking(False)
        opened.connect_ex(("127.0.0.1", port))


def ends(opened: socket.socket, end: bytes) -> bool:
    """Whether the connection brings these bytes, before it is closed."""
    found = b""
    while not found.endswith(end) and (part := opened.recv(4096)):
        found += part
    return found.endswith(end)


def test_a_burst_of_connections_does_not_close_one_whose_request_has_arrived(limited: tuple[Server, int]) -> None:
    server, port = limited
    with contextlib.ExitStack() as stack:
        pause(server, 0.5)
        honest = stack.enter_context(connect(port))
        honest.sendall(request("/v1/translate", BODY))
        burst(stack, port, 200)
        assert honest.recv(12) == b"HTTP/1.1 200"


def test_a_burst_of_connections_does_not_close_one_that_is_kept_open(limited: tuple[Server, int]) -> None:
    server, port = limited
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(connect(port))
        honest.sendall(request("/healthz"))
        assert ends(honest, b'{"status":"ok"}')
        pause(server, 0.2)
        burst(stack, port, 200)
        assert is_healthy(port)
        honest.sendall(request("/healthz"))
        assert ends(honest, b'{"status":"ok"}')


class Connections:
    """Connections of a register that exist only here; taken, closed: numbers of those
    for which there was room, and of those that had to go."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self.register = Register(most, most_per_address)
        self.closed: list[int] = []
        self.taken: list[int] = []

    def open(self, number: int, address: str = "a") -> Any:
        made = Mock(address=address, is_idle=True, close=lambda: self.closed.append(number))
        if self.register.add(made):
            self.taken.append(number)
        return made


def test_new_connections_give_way_to_one_another_where_they_are_the_majority() -> None:
    made = Connections(100, 4)
    known = made.open(0)
    made.register.use(known)
    for number in range(1, 7):
        made.open(number)
    assert made.closed == [1, 2, 3]


def test_a_majority_of_known_connections_gives_way_to_new_ones() -> None:
    made = Connections(100, 4)
    known = [made.open(number) for number in range(4)]
    for connection in (*known, known[0]):
        made.register.use(connection)
    for number in range(4, 8):
        made.open(number)
    assert made.closed == [1, 2, 4, 5], "the least recently used first, and half of the room for each kind"
    assert len(made.register) == 4


def test_connections_at_work_do_not_give_way() -> None:
    made = Connections(3, 3)
    working = [made.open(number, address) for number, address in enumerate("abc")]
    for connection in working:
        connection.is_idle = False
    made.open(3, "d")
    made.register.use(working[1])
    working[1].is_idle = True
    made.open(4, "d")
    assert made.taken == [0, 1, 2, 4]
    assert made.closed == [1]


def test_a_closed_connection_is_not_known_any_more() -> None:
    made = Connections(2, 1)
    first = made.open(0)
    made.open(1)
    made.register.use(first)  # its answer ended when it had been closed already
    assert made.closed == [0]
    assert len(made.register) == 1
