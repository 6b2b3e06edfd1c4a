"""`manyheads score`: a line of figures for a pair of lines."""

import json
from pathlib import Path

import pytest
import torch

from manyheads.decoding.inputs_and_results import Scored
from manyheads.decoding.translator import Translator
from manyheads.tasks.report import score_line


@pytest.fixture
def files(tmp_path: Path, pairs: list[tuple[str, str]]) -> list[str | Path]:
    """Sources and targets; the last pair has empty sides, the last line no line feed."""
    for name, column in (("source", 0), ("target", 1)):
        text = "".join(f"{pair[column]}\n" for pair in pairs) + "\n\u2028a\x85b"
        (tmp_path / name).write_bytes(text.encode())
    return ["--source", tmp_path / "source", "--target", tmp_path / "target"]


def test_table(manyheads, model_folder, files, pairs, capsys):
    assert manyheads("score", model_folder, *files) == 0
    captured = capsys.readouterr()
    rows = [line.split("\t") for line in captured.out.removesuffix("\n").split("\n")]
    assert captured.err == ""
    texts = [*pairs, ("", ""), ("\u2028a\x85b", "\u2028a\x85b")]
    expected = Translator.from_pretrained(model_folder, "cpu").score(*map(list, zip(*texts, strict=True)))
    assert len(rows) == len(expected)
    for (total, count, mean), scored in zip(rows, expected, strict=True):
        assert float(total) == pytest.approx(scored.sum_log_prob, abs=1e-4)
        assert int(count) == len(scored.tokens)
        assert float(mean) == pytest.approx(scored.sum_log_prob / len(scored.tokens), abs=1e-4)
    assert rows[-2][1] == "1"  # an empty target is the end of the sentence alone


def test_a_model_that_gives_nan_scores_nothing(manyheads, model_folder, files, tmp_path, capsys):
    translator = Translator.from_pretrained(model_folder, "cpu")
    with torch.no_grad():
        next(translator.model.parameters()).fill_(float("nan"))  # type: ignore[attr-defined]
    translator.save_pretrained(tmp_path / "bad")
    assert manyheads("score", tmp_path / "bad", *files) == 2
    shown = capsys.readouterr()
    assert "gave NaN log-probabilities for this text" in shown.err
    assert shown.out == ""


def test_progress_is_shown(manyheads, model_folder, files, pairs, monkeypatch, told):
    monkeypatch.setattr("manyheads.tasks.translation.score.BLOCK_PAIRS", 5)
    count = len(pairs) + 2
    assert manyheads("score", model_folder, *files) == 0
    shown = told()
    assert list(shown) == ["loading the model", "scoring"]
    assert shown["scoring"][0] == f"0 of {count}"
    assert f"5 of {count}" in shown["scoring"]
    assert shown["scoring"][-1] == f"{count} of {count}"


def test_tokens(manyheads, model_folder, files, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr("manyheads.tasks.translation.score.BLOCK_PAIRS", 5)
    assert manyheads("score", model_folder, *files, "--tokens", "--output", tmp_path / "out") == 0
    lines = (tmp_path / "out").read_bytes().decode().removesuffix("\n").split("\n")
    records = [json.loads(line) for line in lines]
    assert [record["line"] for record in records] == list(range(1, len(pairs) + 3))
    for record in records:
        assert record["tokens"][-1] == "</s>"
        assert len(record["tokens"]) == len(record["token_log_probs"]) == record["num_tokens"]
        assert record["log_prob"] == pytest.approx(sum(record["token_log_probs"]))


def test_unequal_counts_print_no_score(manyheads, model_folder, files, tmp_path, capsys):
    with (tmp_path / "target").open("ab") as file:
        file.write(b"\nmore\n")
    assert manyheads("score", model_folder, *files) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "has 14 lines" in captured.err
    assert "has 15" in captured.err


def test_bad_files(manyheads, model_folder, files, tmp_path, capsys):
    (tmp_path / "bad").write_bytes(b"\xff" * 3)
    (tmp_path / "empty").write_bytes(b"")
    cases = [
        (["--source", tmp_path / "empty", "--target", tmp_path / "empty"], 0, ""),
        (["--source", tmp_path / "bad", "--target", tmp_path / "bad"], 2, "line 1 is not UTF-8"),
        (["--source", tmp_path, "--target", tmp_path / "bad"], 2, "is a directory"),
        (["--source", tmp_path / "none", "--target", tmp_path / "bad"], 2, "No such file"),
        ([*files, "--output", tmp_path / "source"], 2, "is the file"),
        (["--source", "-", "--target", "-"], 2, "cannot both be standard input"),
        (["--source", "-"], 2, "--target"),
    ]
    for arguments, code, message in cases:
        assert manyheads("score", model_folder, *arguments) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert message in captured.err
        assert "Traceback" not in captured.err


def test_what_is_too_long_is_refused_or_cut_and_counted(manyheads, model_folder, tmp_path, capsys):
    (tmp_path / "source").write_bytes(b"a\n" + b"x" * 50 + b"\nb\xe4\n")
    (tmp_path / "target").write_bytes(b"y" * 70 + b"\nb\nc\n")
    options = ["--source", tmp_path / "source", "--target", tmp_path / "target", "--max-tokens", "40"]
    options += ["--on-bad-utf8", "replace"]
    assert manyheads("score", model_folder, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    expected = (
        f"manyheads: {tmp_path / 'source'}: line 2 has 52 tokens, EOS included, but at most 40 fit (max_tokens 40);"
    )
    assert captured.err.startswith(expected)
    assert "--too-long truncate" in captured.err
    assert manyheads("score", model_folder, *options, "--too-long", "truncate") == 0
    captured = capsys.readouterr()
    assert [line.split("\t")[1] for line in captured.out.removesuffix("\n").split("\n")] == ["40", "3", "3"]
    assert captured.err.split("\n") == [
        "manyheads: source 2 has 52 tokens; only its first 39 are used",
        "manyheads: reference 1 has 72 tokens; only its first 39 are used",
        "manyheads: lines cut because they were too long: 2",
        "manyheads: lines that are not UTF-8, bad bytes replaced: 1",
        "",
    ]


def test_a_line_of_scores_is_json_whatever_the_model_says() -> None:
    line = score_line(3, Scored(["a", "b"], [-float("inf"), -1.0]), tokens=True)
    assert "Infinity" not in line
    found = json.loads(line)
    assert (found["log_prob"], found["token_log_probs"]) == (None, [None, -1.0])
