"""Real sockets: slow, broken and hostile connections, and an orderly end of the program."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving_sockets import answer_of, connect, is_healthy, read_all, request, running

from manyheads.errors import ConfigError, ManyHeadsError
from manyheads.extras.inspect.attending import open_model
from manyheads.extras.serving import served
from manyheads.extras.serving import service as service_module
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.served import load_models
from manyheads.extras.serving.server import Server, bind, serve
from manyheads.extras.serving.settings import ServingSettings


@pytest.fixture(scope="module")
def quick(settings: ServingSettings) -> Iterator[tuple[Server, int]]:
    with running(replace(settings, read_seconds=0.5, write_seconds=0.5, max_connections_per_address=20)) as found:
        yield found


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /healthz HTT",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        request("/healthz"),
        b"POST /v1/translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{",
    ],
)
def test_slow_connections_are_closed(quick: tuple[Server, int], start: bytes) -> None:
    began = time.monotonic()
    with connect(quick[1]) as opened:
        opened.sendall(start)
        found = read_all(opened)
    assert time.monotonic() - began < 5
    assert found.startswith(b"HTTP/1.1 408") if b"Length: 50" in start else b" 408 " not in found


def test_a_dripping_client_is_closed(quick: tuple[Server, int]) -> None:
    with connect(quick[1]) as opened:
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            for byte in request("/healthz", b"", "X-Long: " + "a" * 500):
                opened.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - began < 5


HOST = b"Host: 127.0.0.1\r\n"
POST = b"POST /v1/translate HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\r\n\r\n" * 100,
        b"GET /healthz\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: 1\r\n" * 200 + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + b"X : 1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + b" folded\r\n\r\n",
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
        POST + b"Content-Length: -2\r\n\r\n{}",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        POST + b"Expect: 100-continue\r\nContent-Length: 9999999\r\n\r\n",
        b"CONNECT evil:443 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET http://evil/ HTTP/1.1\r\nHost: evil\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    ],
)  # fmt: skip
def test_malformed_requests_are_answered_or_closed(quick: tuple[Server, int], content: bytes) -> None:
    began = time.monotonic()
    found = b""
    with connect(quick[1]) as opened, contextlib.suppress(ConnectionError):
        opened.sendall(content)
        found = read_all(opened)
    assert time.monotonic() - began < 5
    assert b"HTTP/1.1 5" not in found
    assert is_healthy(quick[1])


LARGE = 32 << 20  # more than what the system keeps of a connection that nobody reads


@pytest.fixture(scope="module")
def keyed(settings: ServingSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with a key, whose bodies may arrive slowly."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("own-key-12345\n", encoding="utf-8")
    keys.chmod(0o600)
    with running(replace(settings, api_key_file=str(keys), read_seconds=60)) as (_, port):
        yield port


OWN = "Authorization: Bearer own-key-12345"
CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/translate", [OWN], 413),
        ("/v2/document", [OWN], 413),
        ("/v2/document", [OWN, CHUNKED], 413),
        ("/v2/document", ["Authorization: DeepL-Auth-Key another-key"], 403),
        ("/v2/document", [OWN, "Origin: https://evil.example"], 403),
    ],
)
def test_a_client_that_sends_everything_first_receives_the_refusal(keyed, path, headers, status):
    """As proxies do, and clients over TLS."""
    is_chunked = CHUNKED in headers
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    head += [] if is_chunked else [f"Content-Length: {LARGE}"]
    with connect(keyed) as opened:
        opened.settimeout(60)
        opened.sendall("\r\n".join([*head, "", ""]).encode())
        if is_chunked:
            opened.sendall(b"%x\r\n" % LARGE)
        for _ in range(LARGE >> 16):
            opened.sendall(b"x" * (1 << 16))
        if is_chunked:
            opened.sendall(b"\r\n0\r\n\r\n")
        found = read_all(opened)
    assert found.startswith(f"HTTP/1.1 {status} ".encode()), found[:200]
    assert found.endswith(b"}")


@pytest.mark.parametrize("header", [f"Content-Length: {1 << 40}", f"Content-Length: {LARGE}\r\nExpect: 100-continue"])
def test_a_body_that_is_not_worth_reading_is_refused_at_once(keyed: int, header: str) -> None:
    head = ["POST /v1/translate HTTP/1.1", "Host: 127.0.0.1", OWN, header]
    assert answer_of(keyed, "\r\n".join([*head, "", ""]).encode()).startswith(b"HTTP/1.1 413 ")


def test_pipelined_requests_are_answered_in_order(quick: tuple[Server, int]) -> None:
    found = answer_of(
        quick[1], request("/healthz") + request("/readyz") + request("/v1/none", b"", "Connection: close")
    )
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]


def test_a_reader_that_stops_is_disconnected(quick: tuple[Server, int]) -> None:
    server, port = quick
    body = json.dumps({"prompt": "It", "max_new_tokens": 16_000, "stream": True, "top_log_probs": 20}).encode()
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect(("127.0.0.1", port))
        opened.sendall(request("/v1/generate", body))
        opened.recv(100)
        deadline = time.monotonic() + 60
        service = server._service
        while not service.engine.num_running and time.monotonic() < deadline:
            time.sleep(0.01)
        while (server.server_state.connections or service.engine.num_running) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not server.server_state.connections
    assert not service.engine.num_running


@pytest.fixture
def program(translator_folder: Path, warm_program: list[str]) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> tuple[subprocess.Popen[str], int]:
        command = [*warm_program, "serve", str(translator_folder), "--port", "0", *options]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        started.append(process)
        line = process.stderr.readline()
        assert "serving en-de at http://127.0.0.1:" in line, line + process.stderr.read()
        return process, int(line.rsplit(":", 1)[1])

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def test_sigterm_finishes_accepted_requests(program: Any) -> None:
    process, port = program("--debug-delay", "0.05", "--drain-delay", "0.3", "--device", "cpu")
    found: list[bytes] = []
    body = b'{"text": "I am hungry.", "min_new_tokens": 20, "max_new_tokens": 20}'
    clients = [
        threading.Thread(target=lambda: found.append(answer_of(port, request("/v1/translate", body)))) for _ in range(5)
    ]
    for client in clients:
        client.start()
    deadline = time.monotonic() + 30
    while b"manyheads_num_requests_running 5" not in answer_of(port, request("/metrics", b"", "Connection: close")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert b" 503 " in answer_of(port, request("/readyz"))[:20]
    late = threading.Thread(target=lambda: found.append(answer_of(port, request("/v1/translate", body))))
    late.start()
    for client in (*clients, late):
        client.join(60)
    assert process.wait(30) == 0
    assert [one[:12] for one in found] == [b"HTTP/1.1 200"] * 6
    assert all(b"connection: close" in one for one in found)


def test_ctrl_c(program: Any) -> None:
    process, _ = program("--quiet", "--device", "cpu")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130


def test_connections_are_accepted_while_models_load(settings: ServingSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, told = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        assert may_end.wait(60)
        return load_models(*given)

    monkeypatch.setattr(service_module, "load_models", slow)
    with contextlib.closing(bind("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        bound.listen()
        server = Server(build_app(settings, loads=False), settings, told.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
        thread.start()
        try:
            assert is_healthy(port)
            body = b'{"text": "I am hungry."}'
            asked = {
                "/readyz": (503, b""), "/v1/models": (503, b""), "/tokenizer_info": (503, b""),
                "/languages": (503, b""), "/v1/translate": (503, body),
                "/": (200, b""), "/static/app.js": (200, b""), "/metrics": (200, b""),
            }  # fmt: skip
            for path, (status, content) in asked.items():
                found = answer_of(port, request(path, content, "Connection: close"))
                assert found.startswith(b"HTTP/1.1 %d" % status), path
                assert (status == 200) or path == "/readyz" or b"retry-after: 1" in found
            assert not told.is_set()
            may_end.set()
            assert told.wait(60)
            found = answer_of(port, request("/v1/translate", body, "Connection: close"))
            assert found.startswith(b"HTTP/1.1 200")
        finally:
            may_end.set()
            server.should_exit = True
            thread.join(30)


def test_a_model_that_cannot_be_loaded_ends_the_server(settings: ServingSettings, tmp_path: Path) -> None:
    """In a thread of its own, apart from the loop that a browser of earlier tests keeps running in this one."""
    (tmp_path / "config.json").write_text("{}")
    changed = replace(settings, models=(str(tmp_path),))
    with ThreadPoolExecutor(1) as pool, pytest.raises(ManyHeadsError):
        pool.submit(serve, build_app(changed, loads=False), changed, "127.0.0.1", 0, lambda address: None).result()


def test_a_server_that_loads_can_be_stopped(settings: ServingSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that is being loaded is the last one; nobody is told that the server is ready."""
    begun, may_end, told = threading.Event(), threading.Event(), threading.Event()
    loaded: list[str] = []

    def slow(path: str, *options: Any) -> Any:
        loaded.append(path)
        begun.set()
        assert may_end.wait(60)
        return open_model(path, *options)

    monkeypatch.setattr(served, "open_model", slow)
    with contextlib.closing(bind("127.0.0.1", 0)) as bound:
        server = Server(build_app(settings, loads=False), settings, told.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
        thread.start()
        assert begun.wait(60)
        server.handle_exit(signal.SIGTERM, None)
        deadline = time.monotonic() + 60
        while not server._service.state.is_closed and time.monotonic() < deadline:
            time.sleep(0.01)
        may_end.set()
        thread.join(60)
        assert not thread.is_alive()
    assert len(loaded) == 1
    assert not told.is_set()


LOADS_SLOWLY = """
import os, sys, time
from manyheads.cli.main import main
from manyheads.extras.serving import served
def slow(path, *options):
    print("loading", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    return real(path, *options)
real, served.open_model = served.open_model, slow
sys.exit(main(["serve", sys.argv[2], "--port", "0", "--device", "cpu"]))
"""


@pytest.mark.parametrize(
    ("sent", "is_twice", "code"),
    [
        pytest.param(signal.SIGINT, True, 130, id="ctrl-c-twice"),
        pytest.param(signal.SIGTERM, True, 0, id="sigterm-twice", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, False, 130, id="ctrl-c-once", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, 0, id="sigterm-once", marks=pytest.mark.slow),
    ],
)
def test_signals_while_models_load(sent, is_twice, code, translator_folder, tmp_path):
    """The model is not read before the file `go` exists, which after a second signal it never does."""
    go = tmp_path / "go"
    command = [sys.executable, "-c", LOADS_SLOWLY, str(go), str(translator_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "loading\n"
            process.send_signal(sent)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            if is_twice:
                process.send_signal(sent)
            else:
                go.touch()
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == code
    assert said == ("manyheads: stopped while the models were being loaded\n" if is_twice else "")


def test_the_program_listens_before_it_loads(settings: ServingSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` itself: while it loads, a client is answered; then it is told to stop."""
    found: list[bytes] = []

    def asking(given: ServingSettings, *stop: Any) -> Any:
        [server] = servers
        port = server.servers[0].sockets[0].getsockname()[1]
        found.append(answer_of(port, request("/readyz", b"", "Connection: close")))
        server.should_exit = True
        return load_models(given, *stop)

    servers: list[Server] = []
    whole = Server.__init__

    def kept(self: Server, *given: Any) -> None:
        whole(self, *given)
        servers.append(self)

    monkeypatch.setattr(Server, "__init__", kept)
    monkeypatch.setattr(service_module, "load_models", asking)
    thread = threading.Thread(
        target=lambda: serve(build_app(settings, loads=False), settings, "127.0.0.1", 0, lambda address: None)
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert found
    assert found[0].startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize(
    ("host", "reason"),
    [("a..b", "this is no name of a host"), ("x" * 70, "this is no name"), ("203.0.113.7", "Cannot assign")],
)
def test_an_address_that_cannot_be_used_is_named(host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^cannot listen on {host}, port 0: {reason}"):
        bind(host, 0)
