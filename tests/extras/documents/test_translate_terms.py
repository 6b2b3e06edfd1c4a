"""`manyheads translate --terms` for lines: from files, pipes and the prompt."""

import io
from pathlib import Path

import pytest

TERMS = "# a comment\ncat\tHunger\nread\tBahnhof\n"


@pytest.fixture
def terms(tmp_path: Path) -> Path:
    path = tmp_path / "terms.tsv"
    path.write_text(TERMS, encoding="utf-8")
    return path


def test_terms_are_forced_in_lines_and_counted(manyheads, printed, model_folder, terms, stdin, capsys):
    given = b"The CAT and the cat.\n\nI am hungry.\nWe read about the cat.\nIt is concatenated.\n"
    options = ("translate", model_folder, "--max-new-tokens", "12")
    stdin(given)
    plain = printed(*options).split("\n")
    assert not any("Hunger" in line or "Bahnhof" in line for line in plain)
    stdin(given)
    assert manyheads(*options, "--terms", terms) == 0
    captured = capsys.readouterr()
    lines = captured.out.split("\n")
    assert "Hunger" in lines[0]
    assert "Hunger" in lines[3]
    assert "Bahnhof" in lines[3]
    assert [lines[place] for place in (1, 2, 4)] == [plain[place] for place in (1, 2, 4)]  # no term, or inside a word
    assert "manyheads: terms in the translation: 3 of 3, 2 lines searched again\n" in captured.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terms_are_forced_at_the_prompt(printed, model_folder, terms, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal("The cat sees.\n"))
    assert "Hunger" in printed("translate", model_folder, "--max-new-tokens", "12", "--terms", terms)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nbest", "2"], "--terms gives one translation a line by beam search; leave out --nbest"),
        (["--json"], "leave out --json"),
        (["--do-sample"], "leave out --do-sample"),
        (["--terms", "missing.tsv"], "missing.tsv"),
        (["--source-lang", "en"], "--source-lang is for documents"),
    ],
)
def test_what_is_refused(options, message, manyheads, model_folder, terms, capsys):
    lines = terms.with_name("lines.txt")
    lines.write_text("The cat sees.\n")
    assert manyheads("translate", model_folder, lines, "--terms", terms, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
