"""`manyheads prepare`: text files to a folder that train reads, whole or not at all."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from manyheads.cli.watching.phases import StoppedBySignalError
from manyheads.data.translation.prepared import PreparedData
from manyheads.data.translation.preparing import PairList, Rest
from manyheads.errors import ConfigError, DataError
from manyheads.text.tokenizer import Tokenizer

SMALL = ["--vocab-size", "320"]


@pytest.fixture
def files(tmp_path: Path, pairs: list[tuple[str, str]]) -> dict[str, Path]:
    """The same pairs as aligned files, as a packed TSV and as JSONL."""
    for name, column in (("en", 0), ("de", 1)):
        (tmp_path / name).write_text("".join(f"{pair[column]}\n" for pair in pairs), encoding="utf-8")
    (tmp_path / "tsv").write_bytes(gzip.compress("".join(f"{en}\t{de}\n" for en, de in pairs).encode()))
    lines = (json.dumps({"english": en, "german": de}) for en, de in pairs)
    (tmp_path / "jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {name: tmp_path / name for name in ("en", "de", "tsv", "jsonl")}


def test_three_forms_give_the_same_data(manyheads, files, tmp_path, capsys):
    forms: list[list[str | Path]] = [
        [
            "--source",
            files["en"],
            "--target",
            files["de"],
            "--valid-source",
            files["en"],
            "--valid-target",
            files["de"],
        ],
        ["--tsv", files["tsv"], "--valid-tsv", files["tsv"]],
        [
            "--jsonl",
            files["jsonl"],
            "--valid-jsonl",
            files["jsonl"],
            "--source-key",
            "english",
            "--target-key",
            "german",
        ],
    ]
    digests = set()
    for number, form in enumerate(forms):
        output = tmp_path / f"data{number}"
        assert manyheads("prepare", *form, *SMALL, "--output", output) == 0
        captured = capsys.readouterr()
        data = PreparedData.open(output)
        digests.add(data.digest)
        assert data.digest in captured.out
        assert "train: 12 pairs kept of 12 read" in captured.out
        assert f"next: manyheads train --data.path {output} --run-dir runs/{output.name}\n" in captured.out
        assert "encode train: 12 of 12" in captured.err
    assert len(digests) == 1


def test_counts_are_told(printed, tmp_path, pairs):
    rows = [f"{en}\t{de}".encode() for en, de in pairs]
    (tmp_path / "tsv").write_bytes(b"\n".join([*rows[:3], b"\tempty", b"b\xe4d\tbad", *rows[3:], b"a\xe2\x80\xa8b\tc"]))
    options = ["--tsv", tmp_path / "tsv", "--valid-count", "2", *SMALL, "--on-bad-utf8", "skip"]
    out = printed("prepare", *options, "--output", tmp_path / "data")
    assert "train: 11 pairs kept of 15 read" in out
    for line in ("2 held back for validation", "1 left out, because a line is empty", "1 left out, because they are"):
        assert f" {line}" in out
    assert PreparedData.open(tmp_path / "data").valid_text == [pairs[-1], ("a\u2028b", "c")]


def test_tokenizer_options(manyheads, refused, model_folder, files, tmp_path, capsys):
    common = ["prepare", "--tsv", files["tsv"], "--valid-count", "0"]
    for number, place in enumerate((model_folder, model_folder / "tokenizer.json")):
        assert manyheads(*common, "--tokenizer", place, "--output", tmp_path / f"reused{number}") == 0
        made = (tmp_path / f"reused{number}" / "tokenizer.json").read_bytes()
        assert made == (model_folder / "tokenizer.json").read_bytes()
    own = ["--tokenizer.kind", "word", "--tokenizer.vocab-size", "20", "--lowercase"]
    assert manyheads(*common, *own, "--output", tmp_path / "own") == 0
    data = PreparedData.open(tmp_path / "own")
    assert (data.tokenizer.kind, data.tokenizer.vocab_size, data.tokenizer.lowercase) == ("word", 20, True)
    assert data.valid is None
    capsys.readouterr()
    for options in (
        ["--tokenizer", model_folder, "--vocab-size", "99"],
        ["--tokenizer", model_folder, "--new-pieces", "0"],
        ["--new-pieces", "9"],
        ["--vocab-size", "9"],
        ["--vocab-size", "0"],
        ["--tokenizer", tmp_path],
    ):
        assert "tokenizer" in refused(*common, *options, "--output", tmp_path / "bad")
        assert not (tmp_path / "bad").exists()


def test_a_model_goes_on_with_new_pieces(manyheads, model_folder, tmp_path, capsys):
    lines = [f"The man waters {number} lemon trees.\tDer Mann gießt {number} Zitronenbäume." for number in range(60)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data, run = tmp_path / "data", tmp_path / "run"
    common = ("prepare", "--tsv", tmp_path / "pairs.tsv", "--valid-count", "10", "--tokenizer", model_folder)
    assert manyheads(*common, "--new-pieces", "8", "--output", data) == 0
    old, new = Tokenizer.load(model_folder / "tokenizer.json"), PreparedData.open(data).tokenizer
    assert new.pieces[: old.vocab_size] == old.pieces
    assert new.vocab_size == old.vocab_size + 8
    assert f"8 new pieces, after the {old.vocab_size:,} of the tokenizer" in capsys.readouterr().out
    steps = ("--training.max_steps", "2", "--training.max_minutes", "0")
    assert manyheads("train", "--init", model_folder, "--data.path", data, "--run-dir", run, *steps) == 0
    told = capsys.readouterr()
    assert "8 new ids" in told.out + told.err
    assert "are the means of the pieces they replace" in told.out + told.err
    (tmp_path / "in").write_text("The man waters trees.\n", encoding="utf-8")
    assert manyheads("translate", run, tmp_path / "in", "--max-new-tokens", "5") == 0
    assert manyheads(*common, "--new-pieces", "5000", "--output", tmp_path / "more") == 0
    assert "5,000 were requested, but the training text has no more" in capsys.readouterr().out


def test_mistakes_leave_nothing(manyheads, files, tmp_path, capsys):
    (tmp_path / "long").write_text("a\n" * 99, encoding="utf-8")
    (tmp_path / "bad").write_bytes(b"good\nb\xe4d\n")
    (tmp_path / "empty").write_bytes(b"")
    train: list[str | Path] = ["--source", files["en"], "--target", files["de"]]
    cases: list[tuple[list[str | Path], str]] = [
        (train, "--valid-count 500"),
        ([], "no training pairs"),
        (train[:2], "give both aligned files"),
        ([*train, "--tsv", files["tsv"]], "The train pairs"),
        ([*train, "--valid-tsv", files["tsv"], "--valid-count", "1"], "--valid-count"),
        ([*train, "--valid-count", "12"], "none is left to train on"),
        ([*train, "--valid-count", "-1"], "hold back at least 1"),
        (["--source", files["en"], "--target", tmp_path / "long", "--valid-count", "0"], "has 12 lines"),
        (
            ["--source", tmp_path / "bad", "--target", tmp_path / "bad", "--valid-count", "0"],
            "line 2 is not UTF-8: byte",
        ),
        (["--source", tmp_path, "--target", files["de"], "--valid-count", "0"], "is a directory"),
        (["--tsv", tmp_path / "none", "--valid-count", "0"], "No such file"),
        (["--tsv", tmp_path / "empty", "--valid-count", "0"], "No training pairs are left"),
        ([*train, "--valid-tsv", tmp_path / "empty"], "There are no valid pairs in"),
        (["--tsv", "-", "--valid-tsv", "-"], "can be read once"),
        ([*train, "--valid-cuont", "1"], "--valid-count"),
    ]
    before = sorted(tmp_path.iterdir())
    for arguments, message in cases:
        assert manyheads("prepare", *arguments, *SMALL, "--output", tmp_path / "data") == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert sorted(tmp_path.iterdir()) == before


def test_replace_spares_what_is_no_prepared_data(manyheads, refused, files, tmp_path, capsys):
    options = ["prepare", "--tsv", files["tsv"], *SMALL]
    assert manyheads(*options, "--valid-count", "1", "--output", tmp_path / "data") == 0
    assert "--replace" in refused(*options, "--valid-count", "2", "--output", tmp_path / "data")
    assert manyheads(*options, "--valid-count", "2", "--output", tmp_path / "data", "--replace") == 0
    assert len(PreparedData.open(tmp_path / "data").valid_text) == 2
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("x", encoding="utf-8")
    capsys.readouterr()
    for place in (tmp_path / "home", files["en"]):
        assert "leaves it alone" in refused(*options, "--valid-count", "2", "--output", place, "--replace")
    assert (tmp_path / "home" / "thesis.txt").exists()
    assert files["en"].is_file()


@pytest.mark.parametrize(("number", "num_lines"), [(signal.SIGINT, 30_000), (signal.SIGTERM, 3)])
def test_signals_leave_nothing(tmp_path: Path, number: signal.Signals, num_lines: int, warm_program: list[str]) -> None:
    """A signal while it reads from a pipe that stays open: the hardest place, as in the end nothing moves there."""
    command = [*warm_program, "prepare", "--tsv", "-", "--valid-count", "0"]
    (tmp_path / "work").mkdir()
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "work" / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    process.stdin.write(b"a\tb\n" * num_lines)
    process.stdin.flush()
    deadline = time.monotonic() + 300
    while not list((tmp_path / "work").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = _wait(process)
    assert process.returncode == 128 + number
    assert list((tmp_path / "work").iterdir()) == []
    assert out == b""
    assert b"Traceback" not in err
    assert b"stopped" in err


def test_a_kill_leaves_nothing_in_the_way(manyheads, files, tmp_path, capsys):
    """SIGKILL leaves a half-made folder beside the name; the next run of that name clears it away."""
    (tmp_path / "work").mkdir()
    output = tmp_path / "work" / "data"
    command = [sys.executable, "-m", "manyheads.cli.main", "prepare", "--tsv", "-", "--valid-count", "0"]
    process = subprocess.Popen(
        [*command, "--output", str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 300
    while not list((tmp_path / "work").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    _wait(process)
    (left,) = (path.name for path in (tmp_path / "work").iterdir())
    assert left.startswith(f"data.tmp-{process.pid}-")
    (tmp_path / "work" / "data.tmp-20261127").mkdir()
    assert manyheads("prepare", "--tsv", files["tsv"], "--valid-count", "0", *SMALL, "--output", output) == 0
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["data", "data.tmp-20261127"]
    assert "data.tmp-20261127 stays: it does not bear the mark" in capsys.readouterr().err


def _wait(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Wait without closing the pipe that it reads from."""
    process.wait(timeout=300)
    found = process.stdout.read(), process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        with suppress(BrokenPipeError):
            stream.close()
    return found


@pytest.mark.parametrize("replace", [False, True])
def test_what_a_signal_leaves_is_told(manyheads, files, tmp_path, replace, monkeypatch, capsys):
    """It may come before the folder is complete, or when the system still writes it to the disk."""
    output = tmp_path / "data"
    arguments = ["prepare", "--tsv", files["tsv"], "--valid-count", "0", *SMALL, "--output", output]
    if replace:
        assert manyheads(*arguments) == 0
        arguments.append("--replace")

    def early(work: Callable[..., object], show: object, abandon: object) -> object:
        raise StoppedBySignalError(signal.SIGTERM)

    def late(work: Callable[..., object], show: object, abandon: object) -> object:
        work(show)
        raise StoppedBySignalError(signal.SIGTERM)

    told = []
    for interruptible in (early, late):
        monkeypatch.setattr("manyheads.cli.commands.task_commands.interruptible", interruptible)
        capsys.readouterr()
        assert manyheads(*arguments) == 143
        told.append(capsys.readouterr().err.splitlines()[-1])
    before = f"{output} is unchanged" if replace else f"nothing is left in {output}"
    assert told == [f"manyheads: stopped; {before}.", f"manyheads: stopped; {output} was complete already."]


def test_pairs_held_back() -> None:
    pairs = [("a", "b"), ("", "x"), ("c", "d"), ("e", " "), ("f", "g")]
    rest = Rest(PairList("list", pairs), 2)
    assert list(rest.read()) == [("", "x"), ("e", " "), ("a", "b")]
    assert list(rest.holdout.read()) == [("c", "d"), ("f", "g")]
    assert list(rest.read()) == [("", "x"), ("e", " "), ("a", "b")]  # a second time too
    assert "last 2" in rest.holdout.describe()
    with pytest.raises(DataError, match="3 pairs with text"):
        list(Rest(PairList("list", pairs), 3).read())
    with pytest.raises(ConfigError, match="at least 1"):
        Rest(PairList("list", pairs), 0)
