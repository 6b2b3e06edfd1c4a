"""Tokens as labels of a picture: what people can read, where the vocabulary itself shows bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["legible"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_DIGITS = "₀₁₂₃₄₅₆₇₈₉"


def legible(tokens: Sequence[str]) -> list[str]:
    """Bytes that spell a character as that character and their number in it: `<0xE4> <0xBD> <0xA0>` as `你₁ 你₂ 你₃`.

    A visible ASCII sign stands for its byte; bytes that spell nothing that can be seen stay as they are.
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
    """Bytes of a character that begins with this one, in UTF-8; 0 if none of several bytes does."""
    return 2 if 0xC2 <= first < 0xE0 else 3 if 0xE0 <= first < 0xF0 else 4 if 0xF0 <= first < 0xF5 else 0
