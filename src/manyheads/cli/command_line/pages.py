"""Help pages in plain text, and the program's own name."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from manyheads.cli.main import EXIT_CODES

_INDENT = 30


def program() -> str:
    """Return the command that calls this program: its name if the shell finds it, otherwise its path."""
    own = Path(sys.executable).with_name("manyheads")
    found = shutil.which("manyheads")
    if not own.exists() or (found and Path(found).resolve() == own.resolve()):
        return "manyheads"
    shown = os.path.relpath(own)
    return str(own) if shown.startswith("..") else shown


def help_page(usage: str, description: str, examples: Sequence[str], sections: Iterable[tuple[str, list[str]]]) -> str:
    """Return a whole help page.

    Args:
        usage: the command line in short.
        description: a sentence or two, or several lines.
        examples: command lines that run as they stand.
        sections: heading and lines of each.
    """
    paragraphs = re.split(r"(?<=[.:])\n", description)
    about = [line for paragraph in paragraphs for line in _wrapped(paragraph, "")]
    lines = [f"usage: {usage}", "", *about, "", "examples:"]
    lines += [f"  {example}" for example in examples]
    for heading, body in sections:
        lines += ["", f"{heading}:", *body]
    return "\n".join([*lines, "", *_wrapped(EXIT_CODES, "")])


def option_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """`  --name KIND   what it does [default]`, wrapped to the terminal's width. rows: the two columns."""
    lines: list[str] = []
    for name, text in rows:
        left, body = f"  {name}", _wrapped(text, " " * _INDENT)
        if len(left) + 2 <= _INDENT and body:
            body[0] = f"{left:<{_INDENT}}{body[0].strip()}"
            lines += body
        else:
            lines += [left, *body]
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 70), 120)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
