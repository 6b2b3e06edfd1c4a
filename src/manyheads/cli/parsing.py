"""A command's arguments: a dataclass that tyro fills from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro

from manyheads.cli.main import EXIT_CODES

__all__ = ["parse"]

T = TypeVar("T")


def parse(cls: type[T], arguments: Sequence[str], *, command: str, description: str, examples: Sequence[str]) -> T:
    """Fill `cls` from `arguments`; prints help, or a mistake with the nearest option, and leaves by SystemExit.

    Args:
        cls: a dataclass whose fields are the options; docstrings below the fields are their help.
        command: the subcommand's name.
        description: one or two sentences.
        examples: command lines that run as they stand.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    return tyro.cli(
        cls,
        args=list(arguments),
        prog=f"manyheads {command}",
        description=f"{description}\n\nexamples:\n{lines}\n\n{EXIT_CODES}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
