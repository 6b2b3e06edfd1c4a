"""`manyheads prepare --task lm`: text files to a folder for a language model, whole or not at all."""

import gzip
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.data.language.prepared import TextData

Cli = Callable[..., int]
TEXT = b"".join(b"the cat sees dog number %d\n" % number for number in range(50))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_bytes(TEXT)
    return path


def text_of(data: TextData, split: str) -> bytes:
    return data.vocabulary.decode_bytes(getattr(data, split).ids.tolist())


def test_a_text_is_prepared_and_told(manyheads, printed, corpus, tmp_path, capsys):
    (tmp_path / "valid.gz").write_bytes(gzip.compress(b"a cat\n"))
    arguments = ["prepare", "--task", "lm", "--corpus", corpus, corpus, "--valid-corpus", tmp_path / "valid.gz"]
    assert manyheads(*arguments, "--level", "words", "--documents", "files", "-o", tmp_path / "data") == 0
    captured = capsys.readouterr()
    data = TextData.open(tmp_path / "data")
    assert data.digest in captured.out
    assert f"train: 702 tokens from {corpus} + {corpus}" in captured.out
    for line in ("2,680 bytes", "600 words", "100 lines", "2 documents"):
        assert f" {line}\n" in captured.out
    assert "1 of the words are <unk>" in captured.out
    assert f"--data.path {tmp_path / 'data'}" in captured.out
    assert "encode train: 2,680 of 2,680" in captured.err
    assert text_of(data, "train") == TEXT + TEXT
    record = json.loads(printed("info", tmp_path / "data", "--json"))
    assert (record["digest"], record["tokenizer"]["kind"]) == (data.digest, "words")
    (tmp_path / "data" / "train" / "tokens.ids.bin").write_bytes(b"")
    assert manyheads("info", tmp_path / "data", "--verify", "--json") in (0, 2)


def test_text_is_held_back_and_levels_chosen(manyheads, corpus, tmp_path, monkeypatch):
    common = ["prepare", "--task", "lm", "--corpus", corpus, "--valid-bytes", "100", "--test-bytes", "50"]
    assert manyheads(*common, "-o", tmp_path / "bytes") == 0
    data = TextData.open(tmp_path / "bytes")
    parts = [text_of(data, split) for split in ("train", "valid", "test")]
    assert parts == [TEXT[:-150], TEXT[-150:-50], TEXT[-50:]]
    assert manyheads(*common, "--level", "bpe", "--vocab-size", "310", "--lowercase", "-o", tmp_path / "bpe") == 0
    assert TextData.open(tmp_path / "bpe").vocabulary.describe() == {
        "vocab_size": 308, "documents": "none", "lowercase": True
    }  # fmt: skip
    assert manyheads(*common, "--level", "words", "--min-count", "2", "-o", tmp_path / "words") == 0
    kept = ["<eos>", "the", "cat", "sees", "dog", "number", "<unk>"]
    assert TextData.open(tmp_path / "words").vocabulary.tokens(range(7)) == kept
    assert manyheads(*common, "--tokenizer", tmp_path / "words", "-o", tmp_path / "again") == 0
    words = [TextData.open(tmp_path / name).vocabulary.digest for name in ("words", "again")]
    assert words[0] == words[1]


def test_a_vocabulary_learns_more_pieces(manyheads, corpus, tmp_path, capsys):
    common = ["prepare", "--task", "lm", "--valid-bytes", "100", "--corpus"]
    assert manyheads(*common, corpus, "--level", "bpe", "--vocab-size", "300", "-o", tmp_path / "old") == 0
    (tmp_path / "more").write_text("Die Katze sieht den Hund.\n" * 60, encoding="utf-8")
    more = ["--tokenizer", tmp_path / "old", "--new-pieces", "12"]
    assert manyheads(*common, tmp_path / "more", *more, "-o", tmp_path / "new") == 0
    old, new = (TextData.open(tmp_path / name).vocabulary for name in ("old", "new"))
    assert new.vocab_size == old.vocab_size + 12
    assert new.tokens(range(old.vocab_size)) == old.tokens(range(old.vocab_size))
    assert f"12 new pieces, after the {old.vocab_size} of the tokenizer" in capsys.readouterr().out
    sizes = [f"--model.{name}=8" for name in ("d_model", "d_ff", "memory_len")]
    steps = ["--training.max_steps", "1", "--training.max_minutes", "0", "--data.lanes", "2", "--data.segment_len", "8"]
    small = ["--preset", "xl-debug", *sizes, "--model.num_heads=2", "--model.head_dim=4", *steps]
    assert manyheads("train", *small, "--data.path", tmp_path / "old", "--run-dir", tmp_path / "first") == 0
    begin = ["train", "--init", tmp_path / "first", *steps, "--data.path", tmp_path / "new"]
    assert manyheads(*begin, "--run-dir", tmp_path / "second") == 0
    told = capsys.readouterr()
    assert "12 new ids" in told.out + told.err
    assert manyheads(*common, corpus, "-o", tmp_path / "bytes") == 0
    assert manyheads(*common, corpus, "--tokenizer", tmp_path / "bytes", "--new-pieces", "1", "-o", tmp_path / "x") == 2
    assert "a vocabulary of bytes cannot grow" in capsys.readouterr().err


def test_layouts(manyheads, printed, tmp_path, capsys):
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_bytes(b" \n = The <unk> = \n")
    arguments = ["prepare", "--task", "lm", "--layout", "wikitext-2", "--corpus", tmp_path]
    out = printed(*arguments, "-o", tmp_path / "data")
    assert "2,088,628 tokens are published: is this the whole corpus, unchanged?" in out
    data = TextData.open(tmp_path / "data")
    assert text_of(data, "train") == b"\n= The <unk> =\n"
    assert "published" not in printed(*arguments, "--level", "bytes", "-o", tmp_path / "bytes")
    assert text_of(TextData.open(tmp_path / "bytes"), "test") == b" \n = The <unk> = \n"
    assert manyheads("prepare", "--task", "lm", "--layout", "lm1b", "--corpus", tmp_path, "-o", tmp_path / "n") == 2
    assert "does not hold lm1b" in capsys.readouterr().err


def test_mistakes_leave_nothing(manyheads, corpus, tmp_path, capsys):
    (tmp_path / "bad").write_bytes(b"good\nb\xe4d\n")
    (tmp_path / "empty").write_bytes(b"")
    text: list[str | Path] = ["--task", "lm", "--corpus", corpus]
    cases: list[tuple[list[str | Path], str]] = [
        (text, "--valid-bytes"),
        (["--task", "lm"], "Missing: --corpus"),
        ([*text, "--valid-bytes", "9", "--valid-corpus", corpus], "leave it out where --valid-corpus"),
        ([*text, "--valid-bytes", "5000"], "none is left to train on"),
        ([*text, "--valid-bytes", "-1"], "at least 0"),
        ([*text, "--valid-corpus", tmp_path / "empty"], "There is no valid text"),
        ([*text, "--valid-corpus", tmp_path], "is a directory"),
        ([*text, "--valid-corpus", tmp_path / "none"], "No such file"),
        (["--task", "lm", "--corpus", tmp_path / "bad", "--valid-bytes", "0", "--level", "bpe"], "line 2 is not UTF-8"),
        (["--task", "lm", "--corpus", "-", "--valid-corpus", "-"], "can be read once"),
        ([*text, "--valid-bytes", "0", "--on-bad-utf8", "skip"], "no meaning with bytes"),
        ([*text, "--valid-bytes", "0", "--vocab-size", "300"], "exactly 256 bytes"),
        ([*text, "--valid-bytes", "0", "--level", "words", "--min-count", "0"], "min_count is 0; it must be"),
        ([*text, "--valid-bytes", "0", "--tsv", corpus], "--tsv needs --task translation"),
        (
            [*text, "--valid-bytes", "0", "--tokenizer.kind", "bpe"],
            "--tokenizer.kind needs --task translation or parsing",
        ),
        ([*text, "--valid-count", "3"], "--valid-count needs --task translation or parsing"),
        ([*text, "--valid-bytes", "0", "--trees", corpus], "--trees needs --task parsing"),
        ([*text, "--valid-bytes", "0", "--tokenizer", corpus], "valid JSON"),
        ([*text, "--valid-bytes", "0", "--tokenizer", corpus, "--level", "words"], "leave out --level"),
        ([*text, "--layout", "enwik8", "--valid-bytes", "3"], "--valid-bytes cannot be used with --layout enwik8"),
        ([*text, corpus, "--layout", "enwik8"], "needs one --corpus"),
        ([*text, "--layout", "enwik8"], "the corpus of that name has 100,000,000"),
        (["--corpus", corpus], "--corpus needs --task lm"),
        ([*text, "--valid-byts", "0"], "--valid-bytes"),
    ]
    before = sorted(tmp_path.iterdir())
    for arguments, message in cases:
        assert manyheads("prepare", *arguments, "--output", tmp_path / "data") == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert sorted(tmp_path.iterdir()) == before


def test_a_folder_is_replaced_when_asked(manyheads: Cli, corpus: Path, tmp_path: Path) -> None:
    arguments = ["prepare", "--task", "lm", "--corpus", corpus, "--valid-bytes", "0", "-o", tmp_path / "data"]
    assert manyheads(*arguments) == 0
    assert manyheads(*arguments) == 2
    assert manyheads(*arguments, "--level", "words", "--replace") == 0
    assert TextData.open(tmp_path / "data").vocabulary.kind == "words"


def test_a_signal_ends_it_in_order(tmp_path: Path, warm_program: list[str]) -> None:
    """A pipe that never ends, and SIGTERM: exit code 143, and nothing half written."""
    command = [*warm_program, "prepare", "--task", "lm", "--corpus", "-"]
    process = subprocess.Popen(
        [*command, "--valid-bytes", "0", "-o", str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    process.stdin.write(TEXT)
    process.stdin.flush()
    until = time.monotonic() + 300
    while not list(tmp_path.glob("*.tmp-*")) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert list(tmp_path.iterdir()) == []
