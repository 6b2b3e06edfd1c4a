"""docs/reproducing.md: a row for every table of the papers, commands that are understood, figures that are recorded."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator

import pytest
from doc_names import command_fault
from doc_pages import REPOSITORY

from manyheads.cli.main import main

PAGE = (REPOSITORY / "docs" / "reproducing.md").read_text("utf-8")
HEADER = ["table", "shows", "command", "ours", "the whole"]
TABLES = {
    "Transformer": {"1", "2", "3", "4"},
    "Transformer-XL": {*map(str, range(1, 11)), "11-13"},
    "Reformer": {"1", "2", "3", "4"},
}


def rows(paper: str) -> Iterator[list[str]]:
    section = PAGE.split(f"\n## {paper}\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*", section, re.MULTILINE)]
    if lines[0] == HEADER:
        yield from (line for line in lines[2:] if len(line) == len(HEADER))


COMMANDS = sorted({command for paper in TABLES for row in rows(paper) for command in re.findall(r"`([^`]+)`", row[2])})


@pytest.mark.parametrize("paper", TABLES)
def test_every_table_of_a_paper_has_a_row(paper: str) -> None:
    numbers = {row[0].partition(" ")[0] for row in rows(paper)}
    assert TABLES[paper] <= numbers
    for row in rows(paper):
        assert re.search(r"`(manyheads|python) ", row[2]), row
        assert all(row), row


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 25


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` reads its settings; of others, the command and its options are known."""
    monkeypatch.chdir(REPOSITORY)
    program, *arguments = shlex.split(command)
    if program == "python":
        assert (REPOSITORY / arguments[0]).is_file()
        return
    assert program == "manyheads"
    assert command_fault(arguments) == ""
    if arguments[0] == "train":
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main([*arguments, "--print-config"]) == 0
        assert "max_steps" in out.getvalue()


def test_a_wrong_command_is_noticed() -> None:
    assert (
        command_fault(shlex.split("evaluate runs/a --recal --beside runs/b"))
        == "evaluate runs/a --recal --beside runs/b has no option --recal"
    )
    assert command_fault(shlex.split("train --model.memory-length 0")) == "there is no setting --model.memory-length"


@pytest.mark.parametrize("paper", TABLES)
def test_our_figures_are_recorded(paper: str) -> None:
    """Every decimal number and every speed of the column `ours`, but the papers' in brackets, is in experiments/."""
    recorded = "".join(page.read_text("utf-8") for page in (REPOSITORY / "experiments").glob("*.md"))
    for row in rows(paper):
        ours = re.sub(r"\([^)]*\)", "", row[3])
        for figure in re.findall(r"\d+\.\d+|\d,\d{3}(?= x)", ours):
            assert figure in recorded, f"{paper}, table {row[0]}: {figure} is not in experiments/"
