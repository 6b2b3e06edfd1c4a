"""What a short request does not pay for: changes of the thread, and options that were checked before."""

import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError
from manyheads.extras.serving import served
from manyheads.extras.serving.api import shared as answers
from manyheads.extras.serving.api.native.translation import TranslateJob
from manyheads.extras.serving.served import ServedTranslator
from manyheads.extras.serving.settings import ServingSettings


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which texts are encoded and answers are written."""
    found: list[str] = []

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*given: Any) -> Any:
            found.append(threading.current_thread().name)
            return function(*given)

        monkeypatch.setattr(owner, name, call)

    note(TranslateJob, "_encode")
    note(answers, "dump")
    return found


@pytest.mark.parametrize(
    ("more", "is_short"),
    [
        ({"text": "I am hungry."}, True),
        ({"text": "I am hungry. " * 50}, False),
        ({"text": "I am hungry.", "top_log_probs": 2}, False),
        ({"text": "I am hungry.", "alignments": True}, False),
    ],
    ids=["short", "long", "alternatives", "alignments"],
)
def test_only_long_work_leaves_the_loop(client, threads, more, is_short):
    assert client.post("/v1/translate", json={**more, "max_new_tokens": 20}).status_code == 200
    assert len(threads) >= 2
    assert is_short != any(name.startswith("manyheads-tokenizer") for name in threads), threads


@pytest.fixture
def counted(translator_folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ServedTranslator, list[dict[str, Any]]]:
    """A served model, and the options of each call that checked them."""
    reader, calls = Translator.from_pretrained(translator_folder, "cpu"), list[dict[str, Any]]()
    check = reader.options

    def options(**given: Any) -> Any:
        calls.append(given)
        return check(**given)

    monkeypatch.setattr(reader, "options", options)
    return ServedTranslator(name="en-de", limits=ServingSettings(), reader=reader), calls


def test_options_are_checked_once(counted: tuple[ServedTranslator, list[dict[str, Any]]]) -> None:
    model, calls = counted
    for _ in range(3):
        assert model.settings({"num_beams": 3}).num_beams == 3
        assert model.settings({"num_beams": 1, "do_sample": True}).do_sample
    assert len(calls) == 2
    for _ in range(2):
        with pytest.raises(ConfigError):
            model.settings({"num_beams": 0})
    assert len(calls) == 4


def test_true_is_not_taken_for_one(counted: tuple[ServedTranslator, list[dict[str, Any]]], client: TestClient) -> None:
    """Python says that they are equal, and a dict of options finds one for the other."""
    model, _ = counted
    model.settings({"num_beams": 1, "temperature": 1.0})
    for options in ({"num_beams": True}, {"num_beams": 1, "temperature": True}):
        with pytest.raises(ConfigError):
            model.settings(options)
    for num_beams, status in ((1, 200), (True, 422), (1, 200)):
        body = {"text": "I am hungry.", "max_new_tokens": 4, "num_beams": num_beams}
        assert client.post("/v1/translate", json=body).status_code == status


def test_few_options_are_kept(counted, monkeypatch):
    """A client chooses them, so they must not fill the memory."""
    model, calls = counted
    monkeypatch.setattr(served, "_MOST_CHECKED", 5)
    for seed in range(23):
        assert model.settings({"seed": seed}).seed == seed
        assert len(model.checked) <= 5
    before = len(model.checked)
    assert model.settings({"forced_prefix_ids": [5] * 3}).forced_prefix_ids == (5, 5, 5)
    assert len(model.checked) == before
    assert len(calls) == 24
