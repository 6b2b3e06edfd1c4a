"""Settings of labelled text and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.config.checks import MOST_UNITS
from manyheads.data.settings import check_rows

__all__ = ["TATOEBA_LANGUAGES", "LabelledSettings"]

TATOEBA_LANGUAGES = "embedded:tatoeba-languages"
"""The sentences of the embedded pairs, each labelled with its language, en or de."""


@dataclass(frozen=True, kw_only=True)
class LabelledSettings:
    """Labelled text and batches.

    Args:
        path: a folder written by `manyheads prepare --task classification`, or `embedded:tatoeba-languages`: English
            and German sentences with their language.
        max_tokens: size of one optimiser step: rows x longest text, with padding and EOS, over all micro-batches and
            ranks.
        accumulate: number of micro-batches per optimiser step.
        max_len: maximum length of a training text in tokens, including EOS.
        too_long: for longer training texts: `truncate` them (EOS is kept), `drop` them, or `fail`. They are always
            counted.
        pad_to_multiple: pad batches to a multiple of this number of tokens, but not beyond max_len.

    Raises: ConfigError: a number is out of range.
    """

    row: ClassVar[str] = "text"  # for messages, as the next two
    unit: ClassVar[str] = "tokens"
    remedy: ClassVar[str] = "truncate or drop"

    path: str = TATOEBA_LANGUAGES
    max_tokens: int = 4096
    accumulate: int = 1
    max_len: int = 256
    too_long: Literal["truncate", "drop", "fail"] = "truncate"
    pad_to_multiple: int = 1

    def __post_init__(self) -> None:
        check_rows(self, MOST_UNITS)
