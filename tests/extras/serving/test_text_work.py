"""Work on texts outside the model: in pieces, in turn, up to the deadline, and never so long that `/healthz` waits."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from manyheads.extras.documents import sentence_ends
from manyheads.extras.serving import texts as sentences
from manyheads.extras.serving.api import shared as answers
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.service import Service
from manyheads.extras.serving.settings import ApiKeys, ServingSettings
from manyheads.extras.serving.texts import split

LONG = 200_000


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service(ServingSettings(), ApiKeys([]))
    yield made
    made._pool.shutdown()


def asked(client: str = "a", arrived: float = 1e9) -> Request:
    """A request whose deadline is far away."""
    return Request({"type": "http", "manyheads.client": client, "manyheads.arrived": arrived})


@pytest.mark.parametrize("window", [3, 7, 40])
def test_a_text_in_windows_has_the_same_sentences(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """If they are shorter than a window, and their end and what decides about it are seen together."""
    monkeypatch.setattr(sentence_ends, "WINDOW", window)
    draw = random.Random(window)
    for _ in range(200):
        text = "".join(draw.choice(["ab|", "c|", "d", " |", "é|"]) for _ in range(draw.randrange(60)))
        pieces = list(sentence_ends.in_windows(text, lambda part: part.replace("|", "|\0").rstrip("\0").split("\0")))
        assert "".join(pieces) == text
        longest = max(map(len, text.split("|")), default=0)
        if longest < window:
            assert pieces == text.replace("|", "|\0").rstrip("\0").split("\0") or not text


def test_a_text_of_many_windows_is_split_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The cat sees Mr. Smith. He reads 3.5 books!  Why? \n\nShe is 25. Dr. No goes. " * 9
    whole = split(text)
    monkeypatch.setattr(sentence_ends, "WINDOW", 64)
    assert split(text) == whole


@pytest.mark.parametrize("unit", ["a", "a.", ". ", "x ", "Hello. ", "\u0301", "\n", "a\n", "&#", "。"])
def test_no_call_sees_more_characters_than_a_window(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    seen: list[int] = []
    cut = sentences.split_sentences
    monkeypatch.setattr(sentences, "split_sentences", lambda text, language: seen.append(len(text)) or cut(text))
    text = (unit * LONG)[:LONG]
    found = split(text)
    assert max(seen, default=0) <= sentence_ends.WINDOW
    assert all(text[one.start : one.end] == one.text for one in found)


def test_the_work_ends_at_the_deadline(settings: ServingSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline passes in the third of many calls."""
    app = build_app(settings)
    calls: list[int] = []
    cut = sentences.split_sentences

    def counted(text: str, language: str | None) -> list[str]:
        calls.append(len(text))
        if len(calls) == 3:
            monkeypatch.setattr(app.state.service, "end", lambda request: 0.0)
        return cut(text, language)

    monkeypatch.setattr(sentences, "split_sentences", counted)
    bodies = [
        ("/v1/translate", {"text": "Hello. " * 80_000}),
        ("/translate", {"q": "Hello. " * 80_000, "source": "en", "target": "de"}),
        ("/translate", {"q": ("<p>" + "Hello. " * 8_000) * 12, "source": "en", "target": "de", "format": "html"}),
    ]
    with TestClient(app) as client:
        for path, body in bodies:
            calls.clear()
            monkeypatch.setattr(app.state.service, "end", lambda request: request.scope["manyheads.arrived"] + 60)
            answer = client.post(path, json=body)
            assert answer.status_code == 504, answer.text[:300]
            assert len(calls) == 3
        monkeypatch.setattr(app.state.service, "end", lambda request: request.scope["manyheads.arrived"] + 60)
        assert client.post("/v1/translate", json={"text": "Hello.", "max_new_tokens": 3}).status_code == 200


def test_a_call_that_does_not_end_is_answered_at_the_deadline(service: Service) -> None:
    goes_on = threading.Event()
    service.settings = replace(service.settings, deadline_seconds=0.05)
    request = asked(arrived=time.monotonic())
    with pytest.raises(Refusal) as caught:
        asyncio.run(service.off_loop(request, goes_on.wait))
    goes_on.set()
    assert caught.value.status == 504
    with pytest.raises(TimeoutError):
        service.check_deadline(request)


def test_the_work_of_a_client_that_leaves_ends(service: Service) -> None:
    goes_on = threading.Event()
    request = asked()

    async def leave() -> None:
        work = asyncio.ensure_future(service.off_loop(request, goes_on.wait))
        await asyncio.sleep(0.01)
        service.check_deadline(request)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        goes_on.set()

    asyncio.run(leave())
    with pytest.raises(TimeoutError):
        service.check_deadline(request)


def test_clients_take_turns(service: Service) -> None:
    order: list[str] = []
    goes_on = threading.Event()

    async def work() -> None:
        first = asyncio.ensure_future(service.off_loop(asked("many"), goes_on.wait))
        await asyncio.sleep(0.01)
        calls = [
            service.off_loop(asked("many"), lambda number=number: order.append(f"many {number}")) for number in range(5)
        ]
        others = [service.off_loop(asked(one), lambda one=one: order.append(one)) for one in ("b", "c")]
        waiting = asyncio.gather(first, *calls, *others)
        await asyncio.sleep(0.01)
        goes_on.set()
        await waiting

    asyncio.run(work())
    assert order[:2] == ["b", "c"]
    assert order[2:] == [f"many {number}" for number in range(5)]


def test_items_come_in_pieces(service: Service) -> None:
    sizes: list[int] = []

    def double(some: list[str]) -> list[str]:
        sizes.append(sum(map(len, some)))
        return [one + one for one in some]

    items = ["a" * (number % 977) for number in range(400)]
    found = asyncio.run(service.each(asked(), double, items, len))
    assert found == [one + one for one in items]
    assert max(sizes) <= 1 << 15
    assert len(sizes) > 2
    assert asyncio.run(service.each(asked(), double, [], len)) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": [' + b"1," * 300_000 + b"1]}", "values"),
        (b'{"prompt": [' + b"[]," * 20_000 + b"[]]}", "lists"),
        (b'{"prompt": [' + b'"",' * 20_000 + b'""]}', "texts"),
        (b'{"prompt": [' + b'"\\ud800",' * 20_000 + b'""]}', "texts"),
        (b'{"prompt": [' + b"true," * 200_000 + b"1]}", "prompt"),
        (b'{"prompt": [' + b"-1," * 200_000 + b"1]}", "prompt"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(30_000)) + b"}", "texts"),
        (b'{"logit_bias": {' + b",".join(b'"%d":1' % number for number in range(2_000)) + b"}}", "names"),
    ],
    ids=["values", "lists", "texts", "surrogates", "wrong", "negative", "keys", "nested keys"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/generate"])
def test_bodies_of_many_values_are_refused_at_once(client: TestClient, path: str, content: bytes, said: str) -> None:
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert said in answer.json()["error"]["message"]
    assert len(answer.content) < 1_000


def test_marks_inside_texts_are_not_counted(client: TestClient) -> None:
    text = '[{,:"\\' * 40_000
    answer = client.post("/tokenize", json={"prompt": text})
    assert answer.status_code == 200
    assert answer.json()["count"] == len(text)


def test_ids_up_to_the_limit_are_read(client: TestClient) -> None:
    ids = [65, 66] * 60_000
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "AB" * 60_000}


def test_long_lists_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": list(range(50_001)), "b": ["é"] * 12_000, "c": [[1.5, None]] * 3, "d": []}
    longest: list[int] = []
    plain = answers._plain
    monkeypatch.setattr(
        answers, "_plain", lambda part: longest.append(len(part) if isinstance(part, list) else 0) or plain(part)
    )
    assert json.loads(answers.dump(value)) == value
    assert max(longest) <= 10_000


@pytest.mark.parametrize("path", ["/translate", "/v2/translate"])
def test_an_endless_paragraph_of_html_is_refused(client: TestClient, path: str) -> None:
    text = "<p>short</p><p>" + "a" * (sentences.MOST_MARKED + 1) + "</p>"
    body = {"q": text, "source": "en", "target": "de", "format": "html"}
    if path == "/v2/translate":
        body = {"text": [text], "target_lang": "DE", "tag_handling": "html"}  # type: ignore[dict-item]
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert "65,537; the limit is 65,536" in answer.text


def test_more_sentences_than_can_wait_are_refused_while_they_are_counted(settings: ServingSettings) -> None:
    with TestClient(build_app(replace(settings, max_waiting_tokens=3_000))) as client:
        answer = client.post("/v1/translate", json={"text": "Hello. " * 100_000})
    assert answer.status_code == 422
    assert "the number of sentences is 1,001; the limit is 1,000" in answer.text


def test_a_part_of_the_places_is_kept_for_clients_that_have_none(settings: ServingSettings) -> None:
    app = build_app(replace(settings, max_requests=8))
    body: dict[str, Any] = {"text": "Hello.", "max_new_tokens": 3}
    with TestClient(app, client=("10.0.0.1", 1)) as hog:
        state = app.state.service.state
        state.num_requests = state.clients["10.0.0.1"] = 7
        assert hog.post("/v1/translate", json=body).status_code == 429
        other = TestClient(app, client=("10.0.0.2", 1))
        assert other.post("/v1/translate", json=body).status_code == 200
        assert state.clients == {"10.0.0.1": 7}
        state.num_requests = 8
        assert other.post("/v1/translate", json=body).status_code == 429


def test_a_client_is_its_key_or_its_address(settings: ServingSettings, tmp_path: Any, monkeypatch: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key-1\nsecond-key\n")
    file.chmod(0o600)
    app = build_app(replace(settings, api_key_file=str(file)))
    seen: list[Any] = []
    submit = app.state.service.engine.submit
    monkeypatch.setattr(app.state.service.engine, "submit", lambda job: seen.append(job.client) or submit(job))
    asked = {"q": "Hello.", "source": "en", "target": "de"}
    with TestClient(app, client=("10.0.0.9", 1)) as client:
        client.post("/v1/translate", json={"text": "a", "max_new_tokens": 3}, headers={"x-api-key": "second-key"})
        client.post("/translate", json={**asked, "api_key": "first-key-1"})
    assert seen == ["second-key", "first-key-1"]
    app = build_app(settings)
    again = app.state.service.engine.submit
    monkeypatch.setattr(app.state.service.engine, "submit", lambda job: seen.append(job.client) or again(job))
    with TestClient(app, client=("10.0.0.9", 1)) as client:
        client.post("/v1/translate", json={"text": "a", "max_new_tokens": 3}, headers={"x-api-key": "any name"})
    assert seen[2:] == ["10.0.0.9"]


def test_short_work_after_the_deadline_is_answered_with_504(service: Service) -> None:
    """It is done in the event loop itself."""
    request = asked(arrived=0.0)
    service.settings = replace(service.settings, deadline_seconds=1e-9)
    with pytest.raises(Refusal) as caught:
        asyncio.run(service.off_loop(request, lambda: service.check_deadline(request), 1))
    assert caught.value.status == 504
