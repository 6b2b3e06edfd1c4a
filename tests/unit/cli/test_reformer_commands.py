"""A Reformer from end to end: trained on a text and on pictures, judged by hash rounds, asked for files."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.cli.commands.train import read_arguments
from manyheads.cli.main import main
from manyheads.decoding.generator import Generator
from manyheads.errors import ConfigError, RequestError
from manyheads.extras.research.hash_rounds import with_hashes
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.reformer.config import ReformerConfig, ReformerSeq2SeqConfig
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.text.vocabulary import ByteVocabulary, IdVocabulary

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


def test_hash_rounds_give_a_table(run, printed, refused):
    arguments = ["evaluate", run, "--num-hashes", "1", "2", "full", "--max-tokens", "200"]
    first, second = json.loads(printed(*arguments, "--beside", run, "--json"))["results"]
    assert first["trained"] == "LSH-2"
    assert list(first["by_hashes"]) == ["1", "2", "full"]
    assert second["by_hashes"] == first["by_hashes"]
    [own] = json.loads(printed("evaluate", run, "--max-tokens", "200", "--json"))["results"]
    assert own["nats_per_token"] == pytest.approx(first["by_hashes"]["2"]["nats_per_token"], rel=1e-6)
    for wrong, message in (
        (["--num-hashes", "0"], "--num-hashes is '0'; give numbers from 1 to"),
        (["--memory-len", "8"], "has no memory of earlier segments"),
    ):
        assert message in refused("evaluate", run, *wrong)


def test_bits_of_a_byte_only_of_a_whole_text_and_of_ids_of_one_byte(manyheads, printed, tmp_path, capsys):
    """An id of a u16 file stands for more than one byte; a limit above the length of the text is none."""
    np.arange(600, dtype="<u2").tofile(tmp_path / "events.bin")
    given = ["--format", "u16", "--vocab-size", "600", "--corpus", tmp_path / "events.bin", "--valid-bytes", "400"]
    assert manyheads("prepare", "--task", "lm", *given, "-o", tmp_path / "events") == 0
    config = ReformerConfig(vocab_size=600, d_model=8, num_heads=2, d_ff=8, num_layers=1, max_len=64)
    save_pretrained(build_model(config), tmp_path / "ids", tokenizer=IdVocabulary(600, "u16"), task="ids")
    save_pretrained(build_model(dataclasses.replace(config, vocab_size=256)), tmp_path / "bytes",
                    tokenizer=ByteVocabulary())  # fmt: skip
    (tmp_path / "text").write_text("he opened the door")
    capsys.readouterr()
    for name, more, is_known in (
        ("ids", ["--data", tmp_path / "events"], False),
        ("bytes", ["--text", tmp_path / "text", "--max-tokens", "17"], False),
        ("bytes", ["--text", tmp_path / "text", "--max-tokens", "1000"], True),
    ):
        command = ["evaluate", tmp_path / name, "--segment-len", "64", *more]
        [own] = json.loads(printed(*command, "--json"))["results"]
        assert ("bits_per_byte" in own) == is_known
        [row] = json.loads(printed(*command, "--num-hashes", "2", "--json"))["results"]
        assert ("bits_per_byte" in row["by_hashes"]["2"]) == is_known
    assert "       0 " in printed(*command, "--memory-len", "0", "0")


def test_a_model_that_gives_nan_is_not_judged(run, manyheads, tmp_path, capsys):
    generator = Generator.from_pretrained(run, "cpu")
    with torch.no_grad():
        next(generator.model.parameters()).fill_(float("nan"))
    generator.save_pretrained(tmp_path / "bad")
    (tmp_path / "text").write_text("he opened the door and went in. " * 9)
    assert manyheads("evaluate", tmp_path / "bad", "--text", tmp_path / "text", "--num-hashes", "1") == 2
    assert "gave NaN log-probabilities for this text" in capsys.readouterr().err


def test_progress_is_shown(run: Path, manyheads: Cli, told: Callable[[], dict[str, list[str]]]) -> None:
    assert manyheads("evaluate", run, "--num-hashes", "1", "full", "--max-tokens", "200", "--beside", run) == 0
    shown = told()
    parts = [f"model {number}, {hashes}" for number in (1, 2) for hashes in ("LSH-1", "full")]
    assert [what for what in shown if "loading" not in what] == parts
    for what in parts:
        assert shown[what][0] == "0 of 200"
        assert len(shown[what]) > 1
    assert manyheads("info", "reformer-debug", "--length", "32", "--batch", "1") == 0
    # On a slow machine a line with the time may stand between them.
    steps = [line for line in told()["trying steps"] if "so far" not in line]
    assert steps == [f"{done} of 6" for done in range(7)]


def test_hash_rounds_change_and_the_weights_stay(run: Path) -> None:
    model = load(run)
    exact = with_hashes(model, "full")
    assert isinstance(exact.config, ReformerConfig)
    assert (model.config.hash_rounds, exact.config.hash_rounds) == (2, "full")
    assert with_hashes(exact, 8).config.hash_rounds == 8
    for name, tensor in model.state_dict().items():
        assert (exact.state_dict()[name] == tensor).all()


def test_text_is_generated_up_to_the_last_position(run: Path, manyheads: Cli) -> None:
    generator = Generator.from_pretrained(run)
    [[found]] = generator.continuations(["He was "], max_new_tokens=500)
    assert len(found.ids) == 64 - len("\nHe was ") + 1  # the last token need not be read
    with pytest.raises(RequestError, match="prompt 1 has 71 tokens with its beginning, but the model has 64 positions"):
        generator.generate("a" * 70)
    with pytest.raises(RequestError, match="memory_len is 8, but a reformer"):
        generator.generate("a", memory_len=8)
    with pytest.raises(RequestError, match="steps of this reformer cannot be compiled"):
        Generator.from_pretrained(run, compile_steps=True)


def test_pictures_are_written(pictures, manyheads, printed, refused, capsys):
    model, place = pictures / "run", pictures
    assert "(no text: the model writes ids" in (model / "samples" / "step-2.txt").read_text(encoding="utf-8")
    assert manyheads("generate", model, "--output", place / "a.png", "--seed", "1") == 0
    assert manyheads("generate", model, "--output", place / "a.raw", "--seed", "1") == 0
    assert manyheads("generate", model, "--output", place / "A.PNG", "--seed", "1") == 0
    assert (place / "A.PNG").read_bytes() == (place / "a.png").read_bytes()
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
        (["a text", "-o", "x"], "writes ids, not text"),
        ([], "give --output FILE"),
        (["--lines", "-o", place / "x"], "--lines is for text"),
        (["--input", place / "a.png", "-o", place / "x"], "a.png is a PNG file"),
    ):
        assert message in " ".join(refused("generate", model, *wrong).split())
    assert "bits/byte" in printed("evaluate", model, "--split", "valid")


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


def test_memory_is_predicted(printed, refused):
    record = json.loads(printed("info", "reformer-debug", "--length", "32", "--batch", "1", "--json"))
    assert record["total_bytes"] == sum(record[f"{part}_bytes"] for part in ("program", "state", "step"))
    assert "--length is of language models" in " ".join(refused("info", "debug", "--length", "32").split())
