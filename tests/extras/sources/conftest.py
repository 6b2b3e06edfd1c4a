"""A server on loopback with files, and a cache of the test's own."""

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from manyheads.extras.sources import fetching


class Site:
    """files: path -> content. redirects: path -> address. broken: path -> bytes after which the connection ends.
    requests: path and Range of each.
    """

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.broken: dict[str, int] = {}
        self.hides_length = False
        self.requests: list[tuple[str, str | None]] = []


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.requests.append((self.path, wanted))
            if self.path in state.redirects:
                self.send_response(302)
                self.send_header("Location", state.redirects[self.path])
                self.end_headers()
                return
            if self.path not in state.files:
                self.send_error(404)
                return
            content = state.files[self.path]
            begin = int(wanted[6:-1]) if wanted and self.headers.get("If-Range") == f'"{hash(content)}"' else 0
            if begin and begin >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if begin else 200)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            if not state.hides_length:
                self.send_header("Content-Length", str(len(content) - begin))
            self.send_header("ETag", f'"{hash(content)}"')
            self.end_headers()
            self.wfile.write(content[begin : state.broken.pop(self.path, None)])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(fetching, "TRUSTED", {state.url})
    monkeypatch.setenv("MANYHEADS_SOURCES", str(tmp_path / "cache"))
    yield state
    server.shutdown()
    server.server_close()


@pytest.fixture
def prepare(manyheads: Callable[..., int], tmp_path: Path) -> Callable[..., int]:
    """`manyheads prepare` of translations into `data`; with a vocabulary of 300 pieces."""

    def run(*arguments: object) -> int:
        own = ("--vocab-size", "300", "--output", tmp_path / "data")
        return manyheads("prepare", *arguments, *own)

    return run
