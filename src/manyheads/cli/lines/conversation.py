"""A conversation in a terminal: a prompt for each line until the end of the input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from manyheads.errors import ManyHeadsError

__all__ = ["converse", "is_conversation"]


def is_conversation(source: str) -> bool:
    """Whether a file name stands for a terminal in which a user types."""
    return source == "-" and sys.stdin is not None and sys.stdin.isatty()


def converse(wanted: str, answer: Callable[[int, str], None], prompt: str = "> ") -> None:
    """Answer every line that is typed. An error of one line is printed, and the conversation goes on.

    Args:
        wanted: what is to be typed.
        answer: called with the number of the line, from 0, and the line.
        prompt: shown before each line.
    """
    in_terminal = sys.stdout is not None and sys.stdout.isatty()
    if in_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (the arrow keys of input())
    print(f"Type {wanted} and Enter; Ctrl-D ends.", file=sys.stderr)
    number = 0
    while True:
        try:
            # readline must know the prompt to redraw a line, and writes it to the terminal that is standard output
            if not in_terminal:
                print(prompt, end="", file=sys.stderr, flush=True)
            line = input(prompt if in_terminal else "")
        except EOFError:
            print(file=sys.stderr)
            return
        except UnicodeDecodeError as error:
            print(f"manyheads: what was typed is not in the terminal's encoding: {error.reason}.", file=sys.stderr)
            continue
        try:
            answer(number, line)
        except ManyHeadsError as error:
            print(f"manyheads: {error}", file=sys.stderr)
        number += 1
