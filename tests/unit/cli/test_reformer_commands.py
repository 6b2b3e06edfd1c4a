"""A Reformer from end to end: trained on a text and on pictures, judged by hash rounds, asked for files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.pretrained import load
from manyheads.architectures.reformer.config import ReformerConfig, ReformerSeq2SeqConfig
from manyheads.cli.main import main
from manyheads.cli.train import read_arguments
from manyheads.decoding.generator import Generator
from manyheads.errors import ConfigError, RequestError
from manyheads.evaluation.hashes import hashes_of, with_hashes
from manyheads.training.settings import TextConfig, TrainConfig

Cli = Callable[..., int]
Image = pytest.importorskip("PIL.Image")
QUIET = ["--training.plots=False", "--quiet"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reformer") / "run"
    more = ["--training.max-steps=2", "--validation.every-steps=2", "--reading.max-tokens=200", *QUIET]
    assert main(["train", "--preset", "reformer-debug", f"--run-dir={place}", *more]) == 0
    return place


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    (place / "in").mkdir()
    for number in range(6):
        pixels = np.full((4, 4, 3), 40 * number, np.uint8)
        pixels[number % 4] = 255
        Image.fromarray(pixels).save(place / "in" / f"{number}.png")
    given = ["--layout", "images", "--image-size", "4", "--corpus", str(place / "in"), "--valid-bytes", "48"]
    assert main(["prepare", "--task", "lm", *given, "-o", str(place / "data")]) == 0
    sizes = ["--data.segment-len=48", "--data.documents=separate", "--model.max-len=48", "--reading.segment-len=48"]
    more = ["--reading.documents=separate", "--training.max-steps=2", "--validation.every-steps=2", *QUIET]
    command = ["train", "--preset", "reformer-debug", f"--data.path={place / 'data'}", f"--run-dir={place / 'run'}"]
    assert main([*command, *sizes, *more]) == 0
    return place


def test_hash_rounds_give_a_table(run: Path, manyheads: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", run, "--num-hashes", "1", "2", "full", "--max-tokens", "200"]
    assert manyheads(*arguments, "--beside", run, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["results"]
    assert first["trained"] == "LSH-2"
    assert list(first["by_hashes"]) == ["1", "2", "full"]
    assert second["by_hashes"] == first["by_hashes"]
    assert manyheads("evaluate", run, "--max-tokens", "200", "--json") == 0
    [own] = json.loads(capsys.readouterr().out)["results"]
    assert own["nats_per_token"] == pytest.approx(first["by_hashes"]["2"]["nats_per_token"], rel=1e-6)
    for wrong, message in ((["--num-hashes", "0"], "--num-hashes 0 is none"), (["--memory-len", "8"], "remembers")):
        assert manyheads("evaluate", run, *wrong) == 2
        assert message in capsys.readouterr().err


def test_hash_rounds_change_and_the_weights_stay(run: Path) -> None:
    model = load(run)
    assert isinstance(model, LanguageModel)
    exact = with_hashes(model, "full")
    assert isinstance(exact.config, ReformerConfig)
    assert (hashes_of(model.config), hashes_of(exact.config)) == (2, "full")
    assert hashes_of(with_hashes(exact, 8).config) == 8
    for name, tensor in model.state_dict().items():
        assert (exact.state_dict()[name] == tensor).all()


def test_text_is_generated_up_to_the_last_position(run: Path, manyheads: Cli) -> None:
    generator = Generator.from_pretrained(run)
    [[found]] = generator.continuations(["He was "], max_new_tokens=500)
    assert len(found.ids) == 64 - len("He was ") + 1  # the last token need not be read
    with pytest.raises(RequestError, match="prompt 1 has 70 tokens with its beginning, but the model has 64 positions"):
        generator.generate("a" * 70)
    with pytest.raises(RequestError, match="memory_len is 8, but a reformer"):
        generator.generate("a", memory_len=8)


def test_pictures_are_written(pictures: Path, manyheads: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    model, place = pictures / "run", pictures
    assert "(no text: the model writes ids" in (model / "samples" / "step-2.txt").read_text(encoding="utf-8")
    assert manyheads("generate", model, "--output", place / "a.png", "--seed", "1") == 0
    assert manyheads("generate", model, "--output", place / "a.raw", "--seed", "1") == 0
    with Image.open(place / "a.png") as image:
        assert np.asarray(image).tobytes() == (place / "a.raw").read_bytes()
    # Half a picture is completed, and stays as it is.
    (place / "half.raw").write_bytes(bytes(range(24)))
    assert manyheads("generate", model, "--input", place / "half.raw", "--count", "2", "-o", place / "b.png") == 0
    for number in (1, 2):
        with Image.open(place / f"b-{number}.png") as image:
            assert np.asarray(image).tobytes()[:24] == bytes(range(24))
    capsys.readouterr()
    for wrong, message in (
        (["a text", "-o", "x"], "knows no text"),
        ([], "give --output FILE"),
        (["--lines", "-o", place / "x"], "--lines is of text"),
    ):
        assert manyheads("generate", model, *wrong) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert manyheads("evaluate", model, "--split", "valid") == 0
    assert "bits/byte" in capsys.readouterr().out


def test_an_architecture_takes_the_place_of_anothers() -> None:
    _, config = read_arguments(["--preset", "xl-demo", "--architecture", "reformer"])
    assert isinstance(config, TextConfig)
    assert isinstance(config.model, ReformerConfig)
    assert (config.model.d_model, config.model.num_layers, config.reading.memory_len) == (192, 4, None)
    for given in (["--preset", "demo"], ["--data.path", "embedded:tatoeba-en-de"]):
        _, made = read_arguments([*given, "--architecture", "reformer"])
        assert isinstance(made, TrainConfig)
        assert isinstance(made.model, ReformerSeq2SeqConfig)
    with pytest.raises(ConfigError, match="Did you mean reformer"):
        read_arguments(["--preset", "demo", "--architecture", "reforme"])


def test_memory_is_predicted(manyheads: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert manyheads("info", "reformer-debug", "--length", "32", "--batch", "1", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["total_bytes"] == sum(record[f"{part}_bytes"] for part in ("program", "state", "step"))
    assert manyheads("info", "debug", "--length", "32") == 2
    assert "--length is of language models" in " ".join(capsys.readouterr().err.split())
