"""Readable labels of tokens for plots, where the vocabulary shows bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["legible"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_DIGITS = "₀₁₂₃₄₅₆₇₈₉"


def legible(tokens: Sequence[str]) -> list[str]:
    """Replace bytes that form a character by this character, numbered: `<0xE4> <0xBD> <0xA0>` becomes `你₁ 你₂ 你₃`.

    A visible ASCII character stands for its byte. Bytes that form no visible character stay unchanged.
    """
    labels = list(tokens)
    values = [int(found[1], 16) if (found := _BYTE.fullmatch(token)) else -1 for token in tokens]  # -1: not a byte
    for place, first in enumerate(values):
        if 0x20 < first < 0x7F:
            labels[place] = chr(first)
        run = values[place : place + _length(first)]
        with suppress(ValueError):  # the bytes form no character
            char = bytes(run).decode("utf-8")
            labels[place : place + len(run)] = [char + _DIGITS[number] for number in range(1, len(run) + 1)]
    return labels


def _length(first: int) -> int:
    """Return the number of bytes of a UTF-8 character that begins with this byte; 0 if no multi-byte character does."""
    return 2 if 0xC2 <= first < 0xE0 else 3 if 0xE0 <= first < 0xF0 else 4 if 0xF0 <= first < 0xF5 else 0
