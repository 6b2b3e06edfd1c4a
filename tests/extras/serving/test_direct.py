"""Translations that skip FastAPI's layers are answered as those that do not."""

import json
import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.decoding.translator import Translator
from manyheads.extras.serving.api.native import routes

PLAIN = "application/json"
LONG_WAY = "application/json; charset=utf-8"


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that went through all layers to the route."""
    found: list[Any] = []
    answer = routes.whole_or_events

    async def note(job: Any, is_streamed: bool | None) -> Any:
        found.append(job)
        return await answer(job, is_streamed)

    monkeypatch.setattr(routes, "whole_or_events", note)
    return found


def ask(client: TestClient, body: Any, kind: str = PLAIN) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body)
    return client.post("/v1/translate", content=content, headers={"content-type": kind})


def comparable(answer: Any) -> Any:
    """The answer without what differs from request to request."""
    found = json.loads(answer.content)
    found.pop("id", None)
    headers = {name: value for name, value in answer.headers.items() if name not in ("x-request-id", "date")}
    return answer.status_code, found, headers


@pytest.mark.parametrize(
    "body",
    [{"text": "I am hungry. Hello, how are you?"}, {"text": ["I am hungry.", ""], "num_beams": 1, "max_new_tokens": 5}],
    ids=["one", "several"],
)
def test_both_ways_give_the_same_answer(client: TestClient, long_ways: list[Any], body: dict[str, Any]) -> None:
    short = ask(client, body)
    assert not long_ways
    long = ask(client, body, LONG_WAY)
    assert len(long_ways) == 1
    assert short.status_code == 200
    assert comparable(short) == comparable(long)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400), (b"\xff", 400), (b"[" * 100_000, 400), (b"", 422), (b"[]", 422), (b"5", 422), ({}, 422),
        ({"text": "a", "beams": 3}, 422), ({"text": "a", "num_beams": "4"}, 422), ({"text": "a\ud800"}, 422),
        ({"text": "a", "top_k": 10**400}, 422), (b'{"text": "a", "temperature": NaN}', 422),
        ({"text": "a", "num_beams": 0}, 422), ({"text": "word " * 5000}, 422), ({"text": "a", "model": "none"}, 404),
        ({"text": "a", "target_lang": "fr"}, 422), ({"text": ["a"] * 1000}, 422),
        ({"text": "a b", "forced_prefix": "a", "forced_prefix_ids": [5]}, 422),
    ],
)  # fmt: skip
def test_both_ways_refuse_the_same(client: TestClient, body: Any, status: int) -> None:
    short, long = ask(client, body), ask(client, body, LONG_WAY)
    assert comparable(short) == comparable(long)
    assert short.status_code == status


def test_streams_take_the_long_way(client: TestClient, long_ways: list[Any]) -> None:
    answer = ask(client, {"text": "I am hungry.", "stream": True, "max_new_tokens": 4})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(long_ways) == 1


def test_the_log_names_the_route(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = logging.getLogger("manyheads.extras.serving.access")
    monkeypatch.setattr(log, "info", lambda text, *given: lines.append(text % given))
    ask(client, {"text": "I am hungry.", "max_new_tokens": 4})
    assert " POST /v1/translate 200 " in lines[0]


def test_a_fault_is_answered_with_500(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("a fault")

    monkeypatch.setattr(Translator, "options", fail)
    answer = ask(client, {"text": "I am hungry.", "seed": 12_345})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "bug"
