"""Settings of labelled text and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.data.settings import RowSettings

__all__ = ["TATOEBA_LANGUAGES", "LabelledSettings"]

TATOEBA_LANGUAGES = "embedded:tatoeba-languages"
"""The sentences of the embedded pairs, each labelled with its language, en or de."""


@dataclass(frozen=True, kw_only=True)
class LabelledSettings(RowSettings):
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

    row = "text"
    unit = "tokens"
    remedy = "truncate or drop"

    path: str = TATOEBA_LANGUAGES
    too_long: Literal["truncate", "drop", "fail"] = "truncate"
