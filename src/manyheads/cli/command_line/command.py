"""A command as a function of its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TypeVar

from manyheads.cli.command_line.parsing import parse
from manyheads.config.options import CommandPage

T = TypeVar("T")


def command(page: CommandPage[T], name: str) -> Callable[[Callable[[T], int]], Callable[[Sequence[str]], int]]:
    """Turn a function of options into one of the arguments after the command's name; see `parsing.parse`.

    Args: page: of the options. name: of the command, for its help page and messages.
    """

    def of_arguments(run: Callable[[T], int]) -> Callable[[Sequence[str]], int]:
        @wraps(run)
        def parsed(arguments: Sequence[str]) -> int:
            return run(parse(page, arguments, name))

        return parsed

    return of_arguments
