"""What is refused before any work, with which status, and without losing a slot."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from manyheads.errors import ConfigError
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.settings import ApiKeys, ServingSettings, _forbidden

JSON = {"content-type": "application/json"}


def in_a_thread(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it in a loop of its own, apart from the one that a browser of earlier tests keeps running in this thread."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(run())).result()


def steps_of(service: Any) -> float:
    """The steps of all batches so far."""
    [family] = service.metrics.steps.collect()
    return float(family.samples[0].value)


def post(client: TestClient, content: Any = b"{}", path: str = "/v1/translate", **headers: str) -> Any:
    return client.post(path, content=content, headers={**JSON, **{k.replace("_", "-"): v for k, v in headers.items()}})


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"", {}, 422),
        (b"[]", {}, 422),
        (b"[" * 10_000 + b"]" * 10_000, {}, 400),
        (b'{"text": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", {}, 400),
        (b'{"text": "a", "temperature": NaN}', {}, 422),
        (b'{"text": "a", "length_penalty": 1e999}', {}, 422),
        (b'{"text": "a", "seed": ' + b"9" * 5000 + b"}", {}, 400),
        (b"x" * (1 << 20) + b"x", {}, 413),
        (b"text=a", {"content_type": "text/plain"}, 415),
        (b"a", {"content_type": "multipart/form-data; boundary=a"}, 415),
        (b"{}", {"content_encoding": "gzip"}, 415),
        (b"{}", {"host": "evil.example"}, 421),
        (b"{}", {"origin": "https://evil.example"}, 403),
        (b"{}", {"origin": "null"}, 403),
        (b"{}", {"origin": "http://["}, 403),
    ],
)
def test_bad_requests(client: TestClient, content: bytes, headers: dict[str, str], status: int) -> None:
    answer = post(client, content, **headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert (status != 413) or answer.headers["x-should-retry"] == "false"


def test_own_origin_is_allowed(client: TestClient) -> None:
    assert post(client, b'{"text": ""}', origin="http://testserver").status_code == 200


def test_a_body_without_length_is_bounded(client: TestClient) -> None:
    def parts() -> Iterator[bytes]:
        yield from [b" " * 65536] * 17

    assert client.post("/v1/translate", content=parts(), headers=JSON).status_code == 413


def test_unknown_paths_and_methods(client: TestClient) -> None:
    assert client.get("/v1/nothing").status_code == 404
    assert client.get("/v1/translate").status_code == 405
    assert "POST" in client.get("/v1/translate").headers["allow"]
    assert client.options("/v3/glossaries/0").headers["allow"] == "DELETE, GET, PATCH"
    assert client.post("/v3/glossaries/0/dictionaries", json={}).headers["allow"] == "DELETE, PUT"
    assert client.get("/v1/nothing").json()["error"]["message"]


def test_every_answer_has_protective_headers_and_an_id(client: TestClient) -> None:
    for answer in (client.get("/healthz"), client.get("/nothing"), post(client, b"{")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert len(answer.headers["x-request-id"]) == 16


def test_too_many_headers(client: TestClient) -> None:
    answer = client.get("/healthz", headers={f"x-{number}": "1" for number in range(150)})
    assert answer.status_code == 431


def test_the_log_has_no_texts(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    log = logging.getLogger("manyheads.extras.serving")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)
    log.manager._clear_cache()  # type: ignore[attr-defined]  # loggers below remember what is enabled
    post(client, json.dumps({"text": "a secret", "beams": "secret"}).encode())
    client.get("/secret")
    post(client, json.dumps({"text": "secret"}).encode())
    assert len([one for one in records if one.name == "manyheads.extras.serving.access"]) == 3
    assert not [one for one in records if "secret" in one.getMessage()]


@pytest.fixture(scope="module")
def guarded(settings: ServingSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# ours\nlong-enough-1\nlong-enough-2\n")
    keys.chmod(0o600)
    with TestClient(build_app(changed(settings, api_key_file=str(keys)))) as running:
        yield running


def test_keys(guarded: TestClient) -> None:
    body = b'{"text": ""}'
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": b"Bearer \xe9"},
    ):
        answer = guarded.post("/v1/translate", content=body, headers={**JSON, **headers})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    for headers in ({"authorization": "Bearer long-enough-2"}, {"x-api-key": "long-enough-1"}):
        assert guarded.post("/v1/translate", content=body, headers={**JSON, **headers}).status_code == 200
    assert guarded.get("/healthz").status_code == guarded.get("/readyz").status_code == 200
    assert guarded.get("/metrics").status_code == 401


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.read(str(path))
    for content in ("", "# nothing\n", "short\n"):
        path.write_text(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="at least 8"):
            ApiKeys.read(str(path))
    path.write_text("long enough\n", encoding="utf-8-sig")  # as some editors write it
    assert ApiKeys.read(str(path)).allow("long enough")
    path.write_text("# a long remark\n" * 70_000)
    with pytest.raises(ConfigError, match="more than 1,048,576 bytes; give fewer keys"):
        ApiKeys.read(str(path))
    path.chmod(0o640)
    path.write_text("long enough\n")
    with pytest.raises(ConfigError, match="chmod 600"):
        ApiKeys.read(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_keys_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written into it is read; where nobody writes, the server does not wait for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with path.open("w") as writer:
        writer.write("long enough\n")
    assert ApiKeys.read(f"/dev/fd/{handle}").allow("long enough")
    os.close(handle)
    monkeypatch.setattr("manyheads.files.safe_open.WRITER_SECONDS", 0.1)
    with pytest.raises(ConfigError, match="nobody writes into this pipe; name a file"):
        ApiKeys.read(str(path))


@pytest.mark.parametrize(
    ("owner", "user", "mode", "is_read"),
    [
        (0, 10001, 0o440, True), (0, 10001, 0o640, True), (0, 10001, 0o444, False), (0, 10001, 0o460, False),
        (0, 0, 0o440, False), (10001, 10001, 0o440, False), (10001, 10001, 0o400, True),
    ],
)  # fmt: skip
def test_a_secret_of_kubernetes_belongs_to_root(owner, user, mode, is_read, monkeypatch):
    monkeypatch.setattr("manyheads.extras.serving.settings.os.geteuid", lambda: user)
    assert (mode & _forbidden(owner) == 0) is is_read


def test_no_slot_is_lost_and_health_needs_none(settings: ServingSettings) -> None:
    app = build_app(changed(settings, max_requests=1))
    with TestClient(app) as client:
        for content in (b"{", b'{"text": 1}', b'{"text": "I am hungry."}', b'{"text": "\\ud800"}'):
            post(client, content)
        state = app.state.service.state
        assert state.num_requests == 0
        state.num_requests = 1
        answer = post(client)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert client.get("/healthz").status_code == 200


def test_draining(settings: ServingSettings) -> None:
    app = build_app(settings)
    with TestClient(app) as client:
        assert client.get("/readyz").json() == {"status": "ready"}
        app.state.service.state.is_draining = True
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
        answer = post(client, b'{"text": ""}')
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        app.state.service.state.is_closed = True
        assert post(client).status_code == 503


def test_the_deadline(settings: ServingSettings) -> None:
    app = build_app(changed(settings, deadline_seconds=0.3, debug_delay_seconds=0.1))
    with TestClient(app) as client:
        answer = post(client, b'{"text": "I am hungry. Where is the station?", "max_new_tokens": 60}')
        assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
        body = {"prompt": "It", "max_new_tokens": 100, "stream": True}
        text = client.post("/v1/generate", json=body).text
        assert text.rstrip().split("\n\n")[-1].startswith("event: error")
        assert app.state.service.state.num_requests == 0
        metrics = client.get("/metrics").text
    assert 'manyheads_request_success_total{finished_reason="deadline"} 2' in metrics


def test_the_deadline_holds_for_a_client_that_reads_slowly(settings: ServingSettings) -> None:
    """The deadline passes while the client is sent something, not while the server waits for the engine."""
    app = build_app(changed(settings, deadline_seconds=0.5))

    async def run() -> None:
        service = app.state.service
        service.start()
        await service.load()
        model = service.models["novel"]
        options = model.settings({"max_new_tokens": 50})
        rows = model.rows(model.reader.encode_prompts(["It"]), options)
        request = Request({"type": "http", "manyheads.arrived": time.monotonic()})
        taken = 0
        with pytest.raises(Refusal) as caught:  # noqa: PT012
            async for _ in service.stream(request, model.begin(options, rows), rows):
                taken += 1
                await asyncio.sleep(0.2)
        assert caught.value.status == 504
        assert 1 <= taken <= 4
        await service.stop()

    in_a_thread(run)


def test_a_departed_client_frees_its_row(settings: ServingSettings) -> None:
    """The application is called as uvicorn does: `receive` says that the client has left while the engine works."""
    app = build_app(changed(settings, debug_delay_seconds=0.02))
    body = json.dumps({"prompt": "It", "max_new_tokens": 10_000}).encode()

    async def run() -> None:
        service = app.state.service
        service.start()
        await service.load()
        left = asyncio.Event()
        scope = {
            "type": "http", "method": "POST", "path": "/v1/generate", "raw_path": b"/v1/generate", "query_string": b"",
            "headers": [(b"host", b"testserver"), (b"content-type", b"application/json")], "http_version": "1.1",
            "scheme": "http", "client": ("127.0.0.1", 1), "server": ("testserver", 80),
        }  # fmt: skip
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        task = asyncio.ensure_future(app(scope, receive, send))
        while not service.engine.num_running:
            await asyncio.sleep(0.01)
        left.set()
        await task
        before = steps_of(service)
        while service.engine.num_running:
            await asyncio.sleep(0.01)
        assert steps_of(service) - before <= 1
        assert service.state.num_requests == 0
        await service.stop()

    in_a_thread(run)


def test_two_framings_are_refused(client: TestClient) -> None:
    answer = post(client, b"{}", transfer_encoding="chunked", content_length="2")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "framing")
