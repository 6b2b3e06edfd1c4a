"""Output that matches a pattern, over HTTP."""

import json
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.decoding.generator import Generator
from manyheads.decoding.translator import Translator

pytest.importorskip("llguidance", reason="the extra constrained is not installed")

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def completed(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json={"model": "novel", "prompt": "It was ", "max_tokens": 60, **body})


@pytest.mark.parametrize("streams", [False, True])
def test_a_completion_is_json(client: TestClient, streams: bool) -> None:
    answer = completed(client, response_format=OF_SCHEMA, stream=streams)
    assert answer.status_code == 200, answer.text
    if streams:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines if json.loads(line)["choices"])
    else:
        text = answer.json()["choices"][0]["text"]
    assert set(json.loads(text)) == {"age"}


def test_a_continuation_and_a_translation_match(client: TestClient) -> None:
    body = {"model": "novel", "prompt": ["Call ", "x"], "regex": r"[0-9]{3}-[0-9]{4}", "max_new_tokens": 20}
    answer = client.post("/v1/generate", json=body).json()
    assert all(re.fullmatch(r"[0-9]{3}-[0-9]{4}", one["text"]) for [one] in answer["continuations"])
    answer = client.post("/v1/translate", json={"text": "I am new.", "regex": "(ab|b)c", "min_new_tokens": 0}).json()
    assert all(re.fullmatch("(ab|b)c", one["text"]) for one in answer["translations"])
    assert answer["translations"]


def test_the_pattern_of_a_model_has_the_room_of_the_request(client: TestClient, monkeypatch: Any) -> None:
    reader: Any = client.app.state.service.models["novel"].reader  # type: ignore[attr-defined]
    monkeypatch.setattr(reader, "settings", replace(reader.settings, regex="a{40}"))  # which needs more than its own 24
    assert completed(client).json()["choices"][0]["text"] == "a" * 40
    assert completed(client, max_tokens=30).status_code == 422


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, 400, "json_schema is missing"),
        ({"response_format": {"type": "xml"}}, 422, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": []}}}}, 400,
         "response_format: json_schema cannot be used: Unsatisfiable"),
        ({"response_format": OF_SCHEMA, "max_tokens": 3}, 400, "max_new_tokens is 3"),
    ],
)  # fmt: skip
def test_bad_formats(client: TestClient, body: dict[str, Any], status: int, said: str) -> None:
    answer = completed(client, **body)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


@pytest.mark.parametrize("regex", ["(a", "a{300}", "(" * 5000 + ")" * 5000, "a" * 10_001])
def test_bad_patterns(client: TestClient, regex: str) -> None:
    answer = client.post("/v1/generate", json={"prompt": "x", "model": "novel", "regex": regex, "max_new_tokens": 20})
    assert answer.status_code in (400, 422), answer.text
    assert answer.text.count("regex") >= 1
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/completions", "/v1/translate"])
def test_a_pattern_is_not_compiled_by_the_event_loop(client, monkeypatch, path):
    """It can take seconds, in which the server would answer nobody."""
    loop: list[int] = []
    client.portal.call(lambda: loop.append(threading.get_ident()))  # type: ignore[union-attr]
    compiled_by = []
    for reader in (Generator, Translator):
        checked = reader.options

        def options(self: Any, checked: Any = checked, **overrides: Any) -> Any:
            if overrides.get("regex") or overrides.get("json_schema"):
                compiled_by.append(threading.get_ident())
            return checked(self, **overrides)

        monkeypatch.setattr(reader, "options", options)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/generate": {"model": "novel", "prompt": "x", "regex": "(a|b)c", "max_new_tokens": 9},
        "/v1/completions": {"model": "novel", "prompt": "x", "response_format": OF_SCHEMA, "max_tokens": 50},
        "/v1/translate": {"text": "I am new.", "regex": "(a|b)c"},
    }
    client.post(path, json=bodies[path])
    assert compiled_by
    assert not set(compiled_by) & set(loop)
