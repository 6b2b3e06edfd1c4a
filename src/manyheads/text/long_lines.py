"""Splitting of very long texts, so that encoding needs memory for one part only (about 130 bytes per token)."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

SEARCHED = 4096  # number of characters before the end of a part that are searched for a space


def grouped(texts: Sequence[str], most: int) -> Iterator[list[str]]:
    """Yield groups of consecutive texts with at most `most` characters together; a longer text is a group by itself."""
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
    """Split a text into parts whose ids, concatenated, are the ids of the text.

    The text is split at a single space between two words; the tokenizer adds this space to the second part again. If
    there is no such space nearby, it is split inside a word, but not before a character that combines with the one
    before. In this case the ids can differ from those of the whole word, but they decode to the same text.

    Args:
        most: maximum number of characters of a part.
        through_words: split inside a word if there is no space; otherwise the part extends to the next space.

    Returns: pairs (part, whether the tokenizer adds a space before it, as at the start of a text).
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
            while stop > start + max(1, most // 2) and joins_before(text[stop]):
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


def joins_before(char: str) -> bool:
    """Return whether NFC can join the character with the previous one (marks, Hangul vowels and final consonants)."""
    return unicodedata.category(char)[0] == "M" or "\u1160" <= char <= "\u11ff"
