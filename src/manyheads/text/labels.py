"""Readable labels of tokens for plots, where the vocabulary shows bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["legible"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_DIGITS = "₀₁₂₃₄₅₆₇₈₉"


def legible(tokens: Sequence[str]) -> list[str]:
    """Replace bytes that form a character by this character, numbered: `<0xE4> <0xBD> <0xA0>` becomes `你₁ 你₂ 你₃`.

    A visible ASCII character stands for its byte. Bytes that form no visible character stay unchanged.
    """
    labels = list(tokens)
    values = [int(found[1], 16) if (found := _BYTE.fullmatch(token)) else None for token in tokens]
    place = 0
    while place < len(labels):
        first = values[place]
        if first is not None and 0x20 < first < 0x7F:
            labels[place] = chr(first)
        length = 0 if first is None else _length(first)
        run = values[place : place + length]
        if not length or None in run:
            place += 1
            continue
        try:
            char = bytes(value for value in run if value is not None).decode("utf-8")
        except UnicodeDecodeError:
            place += 1
            continue
        labels[place : place + length] = [char + _DIGITS[number] for number in range(1, length + 1)]
        place += length
    return labels


def _length(first: int) -> int:
    """Return the number of bytes of a UTF-8 character that begins with this byte; 0 if it begins no multi-byte
    character.
    """
    return 2 if 0xC2 <= first < 0xE0 else 3 if 0xE0 <= first < 0xF0 else 4 if 0xF0 <= first < 0xF5 else 0
