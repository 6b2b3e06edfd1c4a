"""`--engine ctranslate2`: what it searches, what stays with torch, and that the answers are the same."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, RequestError
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.jobs import Done, RuntimeBatch
from manyheads.extras.serving.settings import ServingSettings

TEXTS = ["I am hungry.", "Hello, how are you? Where is the station?", ""]


class Counted:
    """A runtime that counts its searches."""

    def __init__(self, runtime: Any) -> None:
        self.runtime, self.choice, self.longest_source, self.searched = runtime, "", runtime.longest_source, 0
        self.is_int8 = runtime.is_int8

    def takes(self, *given: Any) -> bool:
        return bool(self.runtime.takes(*given))

    def search(self, sources: list[list[int]], settings: Any, **options: Any) -> Any:
        self.searched += len(sources)
        return self.runtime.search(sources, settings, **options)


@pytest.fixture(scope="module")
def greedy_folder(translator_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime") / "en-de"
    translator = Translator.from_pretrained(translator_folder, "cpu")
    translator.settings = DecodingSettings(num_beams=1, max_new_tokens=12)
    translator.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(greedy_folder: Path, settings: ServingSettings) -> Iterator[tuple[TestClient, Counted]]:
    pytest.importorskip("ctranslate2", reason="no ctranslate2; pip install '.[ct2]'")
    app = build_app(replace(settings, models=(str(greedy_folder),), engine="ctranslate2"))
    with TestClient(app) as client:
        reader = app.state.service.models["en-de"].reader
        counted = Counted(reader.search.engine)
        reader.search = replace(reader.search, engine=counted)
        yield client, counted


def test_the_runtime_searches_and_torch_scores(served: tuple[TestClient, Counted], greedy_folder: Path) -> None:
    client, runtime = served
    translator = Translator.from_pretrained(greedy_folder, "cpu")
    before = runtime.searched
    found = client.post("/v1/translate", json={"text": TEXTS}).json()["translations"]
    assert runtime.searched - before == 3
    sentences = ["I am hungry.", "Hello, how are you?", "Where is the station?"]
    expected = translator.translate(sentences)
    assert [one["text"] for one in found] == [expected[0], f"{expected[1]} {expected[2]}", ""]
    [[own]] = translator.translate_nbest([sentences[0]])
    best = found[0]["sentences"][0]["candidates"][0]
    assert best["token_log_probs"] == pytest.approx(own.token_log_probs, abs=1e-4)
    assert best["score"] == pytest.approx(own.score, abs=1e-4)
    asked = {"q": TEXTS[0], "source": "en", "target": "de"}
    assert client.post("/translate", json=asked).json() == {"translatedText": expected[0]}


def test_what_the_runtime_lacks_is_done_by_torch(served: tuple[TestClient, Counted], greedy_folder: Path) -> None:
    client, runtime = served
    translator = Translator.from_pretrained(greedy_folder, "cpu")
    before = runtime.searched
    for options in ({"do_sample": True, "seed": 3}, {"repetition_penalty": 1.5}, {"forced_prefix_ids": [40, 41]}):
        found = client.post("/v1/translate", json={"text": TEXTS[0], **options}).json()["translations"][0]
        expected = translator.translate(TEXTS[0], **options)  # type: ignore[arg-type]
        assert found["text"] == expected
    assert client.post("/v1/attention", json={"source": "I", "target": "Ich"}).status_code == 200
    assert runtime.searched == before
    runtime.longest_source = 3
    assert client.post("/v1/translate", json={"text": TEXTS[0]}).status_code == 200
    runtime.longest_source = runtime.runtime.longest_source
    assert runtime.searched == before


def test_a_row_that_is_dropped_is_not_searched() -> None:
    class Echo:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def search(self, sources: list[list[int]], settings: Any) -> list[list[Any]]:
            self.sizes.append(len(sources))
            return [[] for _ in sources]

    runtime: Any = Echo()
    batch = RuntimeBatch(runtime, DecodingSettings(), [([1] * (50 - row), row) for row in range(50)])
    batch.drop([7, 0])
    rows = [one.row for _ in range(2) for one in batch.advance() if isinstance(one, Done)]
    assert rows == [row for row in range(49, 0, -1) if row != 7]
    assert runtime.sizes == [32, 16]


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch, ctranslate2"):
        ServingSettings(engine=cast(Any, "marian"))
    with pytest.raises(RequestError, match=r"precision is int8, .* but the engine is torch"):
        ServingSettings(engine="torch", precision="int8")
    assert ServingSettings(precision="int8").engine is None
