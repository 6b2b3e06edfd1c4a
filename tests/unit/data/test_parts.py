"""Preparation continues after a kill, with finished parts that are of the same input and options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextBlock
from manyheads.data.preparing import Parts, parts_folder
from manyheads.data.translation.preparing import PairList, prepare_corpus
from manyheads.errors import ConfigError, DataError, ManyHeadsError, SaveError
from manyheads.text.settings import TokenizerSettings, VocabularySettings
from manyheads.text.tokenizer import Tokenizer

PAIRS = [(f"the {word} number {number}", f"die {word} Zahl {number}") for number in range(9) for word in ("a", "bc")]
SETTINGS = TokenizerSettings(vocab_size=300)


class KilledError(BaseException):
    """Nothing may catch it, as nothing catches SIGKILL."""


@pytest.fixture(autouse=True)
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts of four pairs, and a list of what was done."""
    done: list[str] = []
    train, encode = Tokenizer.train, Tokenizer.encode_many

    def learn(*texts: Any, **options: Any) -> Tokenizer:
        done.append("learn")
        return train(*texts, **options)

    def encode_many(self: Tokenizer, texts: Any) -> Any:
        done.append(texts[0])
        return encode(self, texts)

    monkeypatch.setattr("manyheads.data.translation.preparing.PART_ROWS", 4)
    monkeypatch.setattr(Tokenizer, "train", learn)
    monkeypatch.setattr(Tokenizer, "encode_many", encode_many)
    return done


def run(folder: Path, pairs: list[tuple[str, str]] = PAIRS, settings: TokenizerSettings = SETTINGS, **more: Any) -> Any:
    return prepare_corpus(folder, train=PairList("x", pairs), tokenizer=settings, **more)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed_at(place: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if what == "encode train" and done >= place:
            raise KilledError

    return progress


@pytest.fixture
def begun(tmp_path: Path, work: list[str]) -> Path:
    """A folder whose preparation was killed in the third part."""
    with pytest.raises(KilledError):
        run(tmp_path / "data", progress=killed_at(9))
    assert not (tmp_path / "data").exists()
    work.clear()
    return tmp_path / "data"


def test_the_same_command_continues_with_the_same_bytes(begun: Path, tmp_path: Path, work: list[str]) -> None:
    told: list[tuple[str, int, int]] = []
    run(begun, progress=lambda *phase: told.append(phase))
    assert (f"finished parts found in {parts_folder(begun)}", 5, 5) in told  # the tokenizer, and two of each side
    assert work == [side for start in (8, 12, 16) for side in PAIRS[start]]
    assert not parts_folder(begun).exists()
    run(tmp_path / "undisturbed")
    assert content(begun) == content(tmp_path / "undisturbed")


def test_a_killed_text_continues(tmp_path: Path, work: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.data.language.preparing.PART_BYTES", 40)
    text = TextBlock("x", "".join(f"{pair[0]}\n" for pair in PAIRS).encode())
    settings = VocabularySettings(level="bpe", vocab_size=300)
    monkeypatch.setattr("manyheads.data.language.preparing.BLOCK_BYTES", 10)
    with pytest.raises(KilledError):
        prepare_text(tmp_path / "data", train=text, vocabulary=settings, progress=killed_at(100))
    begun = list(work)
    work.clear()
    prepare_text(tmp_path / "data", train=text, vocabulary=settings)
    assert len(begun) > 3  # `learn`, and blocks of lines
    assert not set(begun) & set(work)
    prepare_text(tmp_path / "undisturbed", train=text, vocabulary=settings)
    assert content(tmp_path / "data") == content(tmp_path / "undisturbed")
    assert not parts_folder(tmp_path / "data").exists()


def test_a_changed_input_gets_only_the_blocks_that_are_equal(begun: Path, tmp_path: Path, work: list[str]) -> None:
    changed = [*PAIRS[:5], ("another", "ein anderer"), *PAIRS[6:]]
    run(begun, changed)
    assert work[0] == "learn"
    run(tmp_path / "undisturbed", changed)
    assert content(begun) == content(tmp_path / "undisturbed")


def test_other_options_get_nothing(begun: Path, tmp_path: Path, work: list[str]) -> None:
    other = TokenizerSettings(vocab_size=310)
    run(begun, settings=other)
    assert work == ["learn", *(side for start in range(0, 18, 4) for side in PAIRS[start])]
    run(tmp_path / "undisturbed", settings=other)
    assert content(begun) == content(tmp_path / "undisturbed")


def test_a_damaged_part_is_made_again(begun: Path, tmp_path: Path, work: list[str]) -> None:
    for path in parts_folder(begun).glob("?" * 64):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    run(begun)
    assert work == ["learn", *(side for start in range(0, 18, 4) for side in PAIRS[start])]
    run(tmp_path / "undisturbed")
    assert content(begun) == content(tmp_path / "undisturbed")


@pytest.mark.parametrize("error", [DataError("this cannot be encoded"), SaveError("the disk is full")])
def test_an_error_of_the_input_or_the_disk_keeps_parts(tmp_path: Path, work: list[str], error: ManyHeadsError) -> None:
    def fail(what: str, done: int, total: int) -> None:
        if what == "encode train" and done >= 9:
            raise error

    with pytest.raises(type(error)) as told:
        run(tmp_path / "data", progress=fail)
    folder = parts_folder(tmp_path / "data")
    assert told.value.__notes__ == [f"The same command continues from the finished parts in {folder}."]
    assert list(tmp_path.iterdir()) == [folder]
    work.clear()
    run(tmp_path / "data")
    assert work == [side for start in (8, 12, 16) for side in PAIRS[start]]
    run(tmp_path / "undisturbed")
    assert content(tmp_path / "data") == content(tmp_path / "undisturbed")
    assert not folder.exists()


def test_an_error_before_the_first_part_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*texts: Any, **options: Any) -> Tokenizer:
        raise DataError("nothing can be learned")

    monkeypatch.setattr(Tokenizer, "train", fail)
    with pytest.raises(DataError) as told:
        run(tmp_path / "data")
    assert not hasattr(told.value, "__notes__")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_the_next_command_costs_no_parts(begun: Path) -> None:
    with pytest.raises(DataError, match="No training pairs"):
        run(begun, [("", "")])
    assert len(list(parts_folder(begun).glob("?" * 64))) == 5


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    theirs = parts_folder(tmp_path / "data")
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds something else; move it"):
        run(tmp_path / "data")
    assert [path.name for path in tmp_path.rglob("*")] == ["data.preparing", "thesis.txt"]


def test_two_commands_cannot_prepare_one_folder(tmp_path: Path) -> None:
    refused = []

    def second(what: str, done: int, total: int) -> None:
        if what == "encode train" and not refused:
            other = Parts(tmp_path / "data", lambda *phase: None)
            with pytest.raises(ConfigError, match=r"prepares .*data at the moment") as error, other:
                other.kept(["anything"], bytes)
            refused.append(error)

    run(tmp_path / "data", progress=second)
    assert refused
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
