"""A tiny model folder with a tokenizer, and a way to run the program inside the test's own process."""

import dataclasses
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.cli.main import main
from manyheads.decoding.settings import DecodingSettings
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer import config as presets
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

PAIRS = [
    ("Hello, how are you?", "Hallo, wie geht es dir?"),
    ("I am hungry.", "Ich habe Hunger."),
    ("The cat sees the dog.", "Die Katze sieht den Hund."),
    ("Where is the station?", "Wo ist der Bahnhof?"),
    ("She reads a book.", "Sie liest ein Buch."),
    ("We are going home.", "Wir gehen nach Hause."),
] * 2


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """A tiny model gains nothing from more, and loses much where the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pairs() -> list[tuple[str, str]]:
    return PAIRS


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Transformer, debug preset: what it says is nonsense, but always the same."""
    tokenizer = Tokenizer.train([text for pair in PAIRS for text in pair], TokenizerSettings(vocab_size=320))
    size = tokenizer.vocab_size
    config = dataclasses.replace(presets.PRESETS["debug"], source_vocab_size=size, target_vocab_size=size)
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("model") / "model"
    settings = DecodingSettings(num_beams=2, max_len_offset=4, min_new_tokens=3, banned_ids=(tokenizer.unk_id,))
    save_pretrained(build_model(config), folder, tokenizer=tokenizer, generation=settings)
    return folder


@pytest.fixture
def manyheads() -> Callable[..., int]:
    """Runs `manyheads ARGUMENTS` in this process. Returns: the exit code."""

    def run(*arguments: str | Path) -> int:
        try:
            return main([str(argument) for argument in arguments])
        except SystemExit as left:
            return int(left.code or 0)

    return run


@pytest.fixture
def printed(manyheads, capsys):
    """Runs a command that succeeds. Returns: its standard output."""

    def run(*arguments: str | Path) -> str:
        assert manyheads(*arguments) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(manyheads, capsys):
    """Runs a command that ends with 2. Returns: what it says."""

    def run(*arguments: str | Path) -> str:
        assert manyheads(*arguments) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, list[str]]]:
    """Makes commands show every bit of their progress. Returns: a function that reads it from standard error.

    What it reads: phase -> `done of total` at each call, in order, without the lines that come from a clock.
    """
    monkeypatch.setattr("manyheads.cli.watching.phases.DELAY_SECONDS", 0.0)
    monkeypatch.setattr("manyheads.cli.watching.phases.PLAIN_SECONDS", float("-inf"))

    def read() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in capsys.readouterr().err.split("\n"):
            what, separator, count = line.partition(": ")
            if separator and not line.endswith("so far"):
                found.setdefault(what, []).append(count)
        return found

    return read


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Makes bytes the standard input."""

    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))

    return give


@pytest.fixture
def compiled_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command with --compile keeps what it compiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that what the command sets is taken back
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path / "cache" / "manyheads" / "compiled"
