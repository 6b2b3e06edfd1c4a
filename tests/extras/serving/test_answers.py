"""Large answers: the same JSON, made by a thread that is not the event loop's."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from manyheads.extras.serving import service
from manyheads.extras.serving.api import openai
from manyheads.extras.serving.api import shared as answers
from manyheads.extras.serving.api.native import translation as records
from manyheads.extras.serving.api.shared import dump, server_event

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_dump_is_json(value: Any) -> None:
    assert dump(value) == json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def test_the_data_of_an_event_is_one_line_to_every_client() -> None:
    """httpx and Python's splitlines end a line at more characters than the standard of events does."""
    data = {"text": "a\u2028b\x85c\r\nd"}
    name, line, end = server_event(data, "token").splitlines()
    assert (name, end) == ("event: token", "")
    assert json.loads(line.removeprefix("data: ")) == data


def test_large_answers_are_made_outside_the_loop(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    tokens, rounded, of_prompt = records.of_tokens, records.rounded, openai._Completion._of_prompt

    def noted(function: Any) -> Any:
        def call(*given: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*given)

        return call

    monkeypatch.setattr(service, "_FEW", -1)  # these answers are short
    monkeypatch.setattr(answers, "dump", noted(dump))
    monkeypatch.setattr(records, "of_tokens", noted(tokens))
    monkeypatch.setattr(records, "rounded", noted(rounded))
    monkeypatch.setattr(openai._Completion, "_of_prompt", noted(of_prompt))
    for path, body in (
        ("/v1/translate", {"text": "I am hungry.", "alignments": True}),
        ("/v1/score", {"text": ["It"]}),
        ("/v1/score", {"source": ["I am hungry."], "target": ["Ich habe Hunger."]}),
        ("/v1/attention", {"source": "I am hungry."}),
        ("/v1/completions", {"model": "novel", "prompt": "It", "echo": True, "logprobs": 1, "max_tokens": 1}),
        ("/v1/completions", {"model": "novel", "prompt": "It", "echo": True, "logprobs": 1, "stream": True}),
    ):
        before = len(threads)
        assert client.post(path, json=body).status_code == 200
        assert len(threads) > before, path
    assert all(name.startswith("manyheads-tokenizer") for name in threads), threads
