"""`manyheads sample-data`: the files of README's examples, written once and never over others."""

import errno
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.cli.command_line.parsing import program
from manyheads.data.corpora import load_novel, load_tatoeba

Program = Callable[..., int]
NAMES = {
    "train.en", "train.de", "valid.en", "valid.de", "sentences.en", "references.de", "novel.txt", "ATTRIBUTION.txt",
}  # fmt: skip


def lines_of(path: Path) -> list[str]:
    return path.read_bytes().decode().removesuffix("\n").split("\n")


def test_it_writes_the_embedded_corpora(manyheads: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my data" / "sample"
    assert manyheads("sample-data", folder) == 0
    assert {path.name for path in folder.iterdir()} == NAMES
    for source, target, split, count in (
        ("train.en", "train.de", "train", 20_000),
        ("valid.en", "valid.de", "valid", 500),
        ("sentences.en", "references.de", "test", 100),
    ):
        found = list(zip(lines_of(folder / source), lines_of(folder / target), strict=True))
        assert found == load_tatoeba(split)[:count]
    assert (folder / "novel.txt").read_bytes() == b"".join(load_novel().values())
    attribution = (folder / "ATTRIBUTION.txt").read_text(encoding="utf-8")
    assert "Sentences from tatoeba.org by way of www.manythings.org/anki, CC BY 2.0 FR" in attribution
    assert all(name in attribution for name in NAMES - {"ATTRIBUTION.txt"})
    shown = capsys.readouterr().out.split("\n")
    assert [line.split()[-2:] for line in shown if line.startswith(str(folder / "train.en"))] == [["20,000", "lines"]]
    words = shlex.split(shown[-2])  # the next command, which a shell reads although the folder's name has a space
    assert words[: len(program().split()) + 2] == ["next:", program(), "prepare"]
    assert words[words.index("--valid-target") + 1] == str(folder / "valid.de")


def test_held_out_sentences_are_in_no_training_data() -> None:
    held_out = {side for pair in load_tatoeba("test")[:100] for side in pair}
    assert not held_out & {side for split in ("train", "valid") for pair in load_tatoeba(split) for side in pair}


def test_fewer_pairs(manyheads: Program, tmp_path: Path) -> None:
    assert manyheads("sample-data", tmp_path, "--pairs", "7") == 0
    assert lines_of(tmp_path / "train.de") == [target for _, target in load_tatoeba("train")[:7]]


def test_again_it_leaves_the_same_files_and_writes_missing_ones(manyheads, tmp_path, capsys):
    assert manyheads("sample-data", tmp_path, "--pairs", "7") == 0
    (tmp_path / "train.de").unlink()
    before = (tmp_path / "train.en").stat().st_mtime_ns
    capsys.readouterr()
    assert manyheads("sample-data", tmp_path, "--pairs", "7") == 0
    shown = [line for line in capsys.readouterr().out.split("\n") if " lines" in line]
    assert [line.split()[0] for line in shown if "was there already" not in line] == [str(tmp_path / "train.de")]
    assert (tmp_path / "train.en").stat().st_mtime_ns == before
    assert len(lines_of(tmp_path / "train.de")) == 7


@pytest.mark.parametrize("taken", ["other content", "same size", "folder", "link to nothing", "pipe"])
def test_it_never_replaces_anything(taken, manyheads, tmp_path, capsys):
    place = tmp_path / "valid.en"
    if taken == "other content":
        place.write_text("mine\n", encoding="utf-8")
    elif taken == "same size":
        text = "".join(f"{source}\n" for source, _ in load_tatoeba("valid")).encode()
        place.write_bytes(text.swapcase())
    elif taken == "folder":
        place.mkdir()
    elif taken == "link to nothing":
        place.symlink_to(tmp_path / "nothing")
    else:
        os.mkfifo(place)
    assert manyheads("sample-data", tmp_path) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{place} exists already with other content, so nothing was written; move it away" in shown.err
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sample", "--pairs", "0"], "--pairs is 0; it must be at least 1 and at most 60000"),
        (["sample", "--pairs", "60001"], "--pairs is 60001"),
        (["file"], "file is a file, so no files can be written into it; name another folder."),
        (["file/below"], "Cannot save file/below/"),
        ([], "Missing: DIR"),
        (["sample", "--pair", "3"], "Did you mean --pairs?"),
    ],
)
def test_mistakes(arguments, said, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine\n", encoding="utf-8")
    assert said in refused("sample-data", *arguments)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_on_a_full_disk_no_empty_folder_stays(manyheads, refused, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in refused("sample-data", tmp_path / "sample")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    assert manyheads("sample-data", tmp_path / "mine") == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]  # it was there before
