"""What is printed for people does not control their terminal."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import manyheads
from manyheads.cli.printing import printable, say

CLI = Path(manyheads.__file__).parent / "cli"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ü, 日本", "plain, ü, 日本"),
        ("two\nlines", "two\nlines"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\u202eb", "a\\u202eb"),
        ("a\0b\x9bc\rd", "a\\x00b\\x9bc\\rd"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_become_visible(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(text) == shown
    say(text, 1)
    assert capsys.readouterr().out == f"{shown} 1\n"


def test_everything_for_people_is_printed_by_one_function() -> None:
    """`print` only writes JSON, YAML, a page of help or another text that is ours or is read by a program."""
    allowed = {"dumps", "help_page", "to_yaml", "settings_page", "complete", "format"}
    found = []
    for path in sorted(CLI.rglob("*.py")):
        if path.name == "printing.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                called = {
                    getattr(inner.func, "attr", getattr(inner.func, "id", ""))
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Call) and inner is not node
                }
                if not called & allowed:
                    found.append(f"{path.relative_to(CLI)}:{node.lineno}")
    assert found == []
