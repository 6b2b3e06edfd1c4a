"""Kinds and scripts of the characters of many sentences at once."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

_UNKNOWN, _OTHER, _LETTER, _DIGIT, _SPACE = range(5)
_KIND = np.zeros(0x110000, np.uint8)
_SCRIPT = np.zeros(0x110000, np.uint8)
_COMMON = 0
"""Number of the script of characters that belong to no script, or to several."""
_NUMBERS = {"": _COMMON}  # name of a script -> its number
# One language writes these together.
_TOGETHER = dict.fromkeys(
    ("CJK", "HIRAGANA", "KATAKANA", "HENTAIGANA", "BOPOMOFO", "IDEOGRAPHIC", "MASU", "VERTICAL"), "EAST ASIAN"
)
_NO_SCRIPT = frozenset({"MODIFIER", "COMBINING", "SPACE"})


def _classify(points: npt.NDArray[np.uint32]) -> None:
    """Enter code points that are new into the tables.

    The script is the first word of a letter's Unicode name, as LATIN or HANGUL, after compatible forms (half-width,
    mathematical, presentation forms, jamo) were replaced by their usual ones; it is as new as Python's `unicodedata`.
    """
    for point in np.unique(points[_KIND[points] == _UNKNOWN]).tolist():
        char, kind = chr(point), _OTHER
        category = unicodedata.category(char)
        if char.isspace():
            kind = _SPACE
        elif category == "Nd":
            kind = _DIGIT
        elif category[0] in "LM":
            usual = unicodedata.normalize("NFKC", char)[0]
            word = re.split("[ -]", unicodedata.name(usual, "UNNAMED"))[0]
            if word != "VARIATION":  # selects the form of an emoji
                kind = _LETTER
                script = "" if word in _NO_SCRIPT else _TOGETHER.get(word, word)
                _SCRIPT[point] = _NUMBERS.setdefault(script, min(len(_NUMBERS), 255))
        _KIND[point] = kind


class SideBlock:
    """The sentences of one side of a block of pairs.

    Args: texts: sentences without line feeds.

    Attributes: chars, letters, digits, spaces: how many of each sentence's characters are of that kind; vowel signs and
        accents are letters. (sentences,)
    """

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = ("\n".join(texts) + "\n").encode("utf-32-le", "surrogatepass")
        self._points = np.frombuffer(encoded, "<u4")
        self._ends = np.flatnonzero(self._points == 0x0A)
        _classify(self._points)
        kinds = _KIND[self._points]
        self.letters = self._count(kinds == _LETTER)
        self.digits = self._count(kinds == _DIGIT)
        self.spaces = self._count(kinds == _SPACE) - 1  # without the line feed
        self.chars = self._count(np.ones(len(self._points), np.bool_)) - 1

    def usual_script(self) -> int:
        """Return the number of the script that most letters are of."""
        counts = np.bincount(_SCRIPT[self._points], minlength=2)
        counts[_COMMON] = 0
        return int(counts.argmax())

    def letters_of(self, script: int) -> Counts:
        """Return the number of letters of one script. (sentences,)"""
        return self._count(_SCRIPT[self._points] == script)

    def letters_with_script(self) -> Counts:
        """Return the number of letters that belong to one script. (sentences,)"""
        return self._count(_SCRIPT[self._points] != _COMMON)

    def has(self, char: str) -> npt.NDArray[np.bool_]:
        """Return which sentences contain a character. (sentences,)"""
        found = np.zeros(len(self._ends), np.bool_)
        places = np.flatnonzero(self._points == ord(char))
        found[np.searchsorted(self._ends, places)] = True
        return found

    def _count(self, which: npt.NDArray[np.bool_]) -> Counts:
        """Return how many characters of each sentence, with the line feed after it, are marked."""
        ends = np.cumsum(which, dtype=np.int64)[self._ends]
        return np.diff(ends, prepend=0)
