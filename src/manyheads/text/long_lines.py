"""Texts of many megabytes in parts, so that encoding takes memory for a part (some 130 bytes a token) and no more."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

__all__ = ["grouped", "in_parts"]

SEARCHED = 4096  # characters before the end of a part in which a good place for the cut is looked for


def grouped(texts: Sequence[str], most: int) -> Iterator[list[str]]:
    """Consecutive texts with at most so many characters together; a longer text comes alone."""
    group: list[str] = []
    room = most
    for text in texts:
        if group and len(text) > room:
            yield group
            group, room = [], most
        group.append(text)
        room -= len(text)
    if group:
        yield group


def in_parts(text: str, most: int, *, through_words: bool) -> Iterator[tuple[str, bool]]:
    """A text in parts whose ids, one after the other, are those of the text.

    It is cut at a single space between two words, which the tokenizer puts in front of the second part again. Where
    there is none far and wide, it is cut inside a word, before no sign that belongs to the one before: there the ids
    may be others than those of the whole word, and they spell the same.

    Args:
        most: characters of a part.
        through_words: cut inside words where there is no space; otherwise the part goes on to the next space.

    Returns: (part, whether it begins as a text does, with a space in front of it).
    """
    start, begins = 0, True
    while len(text) - start > most:
        stop = _last_space(text, max(start, start + most - SEARCHED), start + most)
        if stop is None and not through_words:
            stop = _next_space(text, start + most)
        if stop is not None:
            yield text[start:stop], begins
            start, begins = stop + 1, True
        elif not through_words:
            break
        else:
            stop = start + most
            while stop > start + max(1, most // 2) and _belongs_to_the_one_before(text[stop]):
                stop -= 1
            yield text[start:stop], begins
            start, begins = stop, False
    yield text[start:], begins


def _last_space(text: str, start: int, stop: int) -> int | None:
    while (place := text.rfind(" ", start + 1, stop)) != -1:
        if _is_single(text, place):
            return place
        stop = place
    return None


def _next_space(text: str, start: int) -> int | None:
    while (place := text.find(" ", start, len(text) - 1)) != -1:
        if _is_single(text, place):
            return place
        start = place + 1
    return None


def _is_single(text: str, place: int) -> bool:
    return not text[place - 1].isspace() and not text[place + 1].isspace()


def _belongs_to_the_one_before(char: str) -> bool:
    """Marks, and the vowels and final consonants of Hangul syllables: NFC joins them with what precedes them."""
    return unicodedata.category(char)[0] == "M" or "\u1160" <= char <= "\u11ff"
