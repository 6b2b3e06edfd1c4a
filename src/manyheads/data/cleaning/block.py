"""Counts of characters of many sentences at once, from their UTF-8 bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["SCRIPTS", "SideBlock"]

Counts = npt.NDArray[np.int64]

SCRIPTS = ("Latin", "Greek", "Cyrillic", "Hebrew", "Arabic", "Indic", "East Asian", "Korean", "other")
"""Scripts that the first byte of a letter tells apart; "Indic" includes Thai, "East Asian" Chinese and Japanese."""


def _tables() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return byte -> its kind, and byte -> the script of a letter that begins with it (255: it begins no letter)."""
    script = np.full(256, 255, np.uint8)
    for first, last, name in (
        (0x41, 0x5A, "Latin"), (0x61, 0x7A, "Latin"), (0xC3, 0xCB, "Latin"), (0xCE, 0xCF, "Greek"),
        (0xD0, 0xD4, "Cyrillic"), (0xD5, 0xD5, "other"), (0xD6, 0xD7, "Hebrew"), (0xD8, 0xDB, "Arabic"),
        (0xDC, 0xDF, "other"), (0xE0, 0xE0, "Indic"), (0xE1, 0xE1, "other"), (0xE3, 0xE9, "East Asian"),
        (0xEA, 0xED, "Korean"),
    ):  # fmt: skip
        script[first : last + 1] = SCRIPTS.index(name)
    kind = np.full(256, _OTHER, np.uint8)
    kind[script != 255] = _LETTER
    kind[0x80:0xC0] = _CONTINUATION
    kind[ord("0") : ord("9") + 1] = _DIGIT
    kind[[ord(char) for char in " \t\r"]] = _SPACE
    return kind, script


_OTHER, _LETTER, _DIGIT, _SPACE, _CONTINUATION = range(5)
_KIND, _SCRIPT = _tables()


class SideBlock:
    """The sentences of one side of a block of pairs.

    Args: texts: sentences without line feeds.

    Attributes: chars, letters, digits, spaces: how many of each sentence's characters are of that kind. (sentences,)
        The kinds are exact for ASCII; another character is a letter if its first byte belongs to a block of letters.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._bytes = np.frombuffer(("\n".join(texts) + "\n").encode("utf-8", "surrogatepass"), np.uint8)
        self._ends = np.flatnonzero(self._bytes == 0x0A)
        kinds = _KIND[self._bytes]
        self.letters = self._count(kinds == _LETTER)
        self.digits = self._count(kinds == _DIGIT)
        self.spaces = self._count(kinds == _SPACE)
        self.chars = self._count(kinds != _CONTINUATION) - 1  # without the line feed

    def letters_by_script(self) -> Counts:
        """Return the number of letters of each script. (sentences, scripts)"""
        scripts = _SCRIPT[self._bytes]
        return np.stack([self._count(scripts == number) for number in range(len(SCRIPTS))], 1)

    def letters_of(self, script: int) -> Counts:
        """Return the number of letters of one script. (sentences,)"""
        return self._count(_SCRIPT[self._bytes] == script)

    def has(self, char: str) -> npt.NDArray[np.bool_]:
        """Return which sentences contain an ASCII character. (sentences,)"""
        found = np.zeros(len(self._ends), np.bool_)
        places = np.flatnonzero(self._bytes == ord(char))
        found[np.searchsorted(self._ends, places)] = True
        return found

    def _count(self, which: npt.NDArray[np.bool_]) -> Counts:
        """Return how many bytes of each sentence, with the line feed after it, are marked."""
        ends = np.cumsum(which, dtype=np.int64)[self._ends]
        return np.diff(ends, prepend=0)
