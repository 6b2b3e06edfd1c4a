"""Printing for people. Names and texts from files cannot control the terminal.

A folder's name, a value of its config.json or a sample can contain escape sequences, which change colours, move the
cursor or retitle the window, and characters that reverse the text beside them. Here they become visible. Data for
other programs (`--json`, translations in a pipe, files) is not printed by these functions.
"""

from __future__ import annotations

import sys
from typing import TextIO


def say(*parts: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print as `print` does, with the characters of `printable`. file: None: standard output, as it is now."""
    text = " ".join(map(str, parts))
    print(printable(text), end=end, file=sys.stdout if file is None else file, flush=flush)


def say_or_json(record: object, text: str, *, as_json: bool) -> None:
    """Print a record as JSON for programs, or its text for people."""
    if as_json:
        from manyheads.files.json_object import json_text  # imported here, because help does not need it

        print(json_text(record, indent=2))
    else:
        say(text)


def printable(text: str) -> str:
    """Return a text in which characters that are not printable, other than line ends, are written as Python does."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
