"""A server in a thread of the test, and bytes on real sockets."""

import contextlib
import socket
import threading
from collections.abc import Iterator

from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.server import Server, bind
from manyheads.extras.serving.settings import ServingSettings

__all__ = ["answer_of", "connect", "is_healthy", "read_all", "request", "running"]


@contextlib.contextmanager
def running(settings: ServingSettings) -> Iterator[tuple[Server, int]]:
    """A server in a thread. Yields: it, and its port."""
    ready = threading.Event()
    with contextlib.closing(bind("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        server = Server(build_app(settings), settings, ready.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
        thread.start()
        try:
            assert ready.wait(60)
            yield server, port
        finally:
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()


def connect(port: int) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port), timeout=10)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def request(path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_all(opened: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := opened.recv(65536):
            found += part
    return found


def answer_of(port: int, content: bytes) -> bytes:
    with connect(port) as opened:
        opened.sendall(content)
        return read_all(opened)


def is_healthy(port: int) -> bool:
    return answer_of(port, request("/healthz", b"", "Connection: close")).startswith(b"HTTP/1.1 200")
