"""Settings of labelled text and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.config.checks import MOST_UNITS, between, check
from manyheads.errors import ConfigError

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

    path: str = TATOEBA_LANGUAGES
    max_tokens: int = 4096
    accumulate: int = 1
    max_len: int = 256
    too_long: Literal["truncate", "drop", "fail"] = "truncate"
    pad_to_multiple: int = 1

    def __post_init__(self) -> None:
        check(self, "data.", between(8, MOST_UNITS), "max_tokens")
        check(self, "data.", between(2, MOST_UNITS), "max_len")
        check(self, "data.", between(1, MOST_UNITS), "accumulate", "pad_to_multiple")
        if self.max_tokens // self.accumulate < self.max_len:
            raise ConfigError(
                f"data.max_tokens {self.max_tokens} / data.accumulate {self.accumulate} leaves fewer than"
                f" {self.max_len} tokens per micro-batch, the maximum length of a text; raise max_tokens, or lower"
                " accumulate or max_len.",
                fields=("max_tokens", "accumulate", "max_len"),
            )
