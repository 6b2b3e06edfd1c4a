"""Settings of trees as spans, and of their batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.data.settings import RowSettings

MOST_WORDS = 1_000
"""Maximum length of a sentence that a chart is computed for: time grows with its cube, memory with its square."""


@dataclass(frozen=True, kw_only=True)
class SpanSettings(RowSettings):
    """Trees and batches.

    Args:
        path: a folder written by `manyheads prepare --task spans`.
        max_tokens: size of one optimiser step: rows x longest sentence in words, over all micro-batches and ranks.
        accumulate: number of micro-batches per optimiser step.
        max_len: maximum length of a training sentence in words.
        too_long: for longer training sentences: `drop` or `fail`. They are always counted.
        pad_to_multiple: pad batches to a multiple of this number of words, but not beyond max_len.

    Raises: ConfigError: a number is out of range.
    """

    row = "sentence"
    unit = "words"
    remedy = "drop"
    most_len = MOST_WORDS

    max_tokens: int = 1024
    too_long: Literal["drop", "fail"] = "drop"
