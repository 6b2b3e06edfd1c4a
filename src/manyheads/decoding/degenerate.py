"""Two checks for repetitive output: one for a warning about the model, and a stricter one that starts a second
search."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

_LEAST_REPEATS = 5
_LEAST_CHARACTERS = 10
_REPEATED = re.compile(rf"(.{{1,20}}?)\1{{{_LEAST_REPEATS - 1},}}")
_SAME_CHARACTERS = re.compile(r"(.)\1{9,}")
_LONGEST_RUN = 3  # up to this many repetitions are normal language: "very, very, very"


def repeats_itself(text: str) -> bool:
    """Return whether repetitions of one piece make up at least half of the text.

    The piece has at most 20 characters: a token, a word or a short phrase. It occurs at least 5 times in a row. That
    takes at least 10 characters, so that a number with many zeros is no repetition.
    """
    text = " " + " ".join(text.split())  # every word then begins with a space, the first too
    repeated = [len(found[0]) for found in _REPEATED.finditer(text)]
    return 2 * sum(length for length in repeated if length >= _LEAST_CHARACTERS) >= len(text)


def is_degenerate(source: str, text: str) -> bool:
    """Return whether a translation is empty, or repeats a word or a character that its source does not repeat.

    Stricter than `repeats_itself`: one run of a word in a long text is enough, because a second search costs little.
    """
    if not text.strip():
        return bool(source.strip())
    if _SAME_CHARACTERS.search(text) and not _SAME_CHARACTERS.search(source):
        return True
    words, source_words = text.casefold().split(), source.casefold().split()
    if _longest_run(words) > max(_LONGEST_RUN, _longest_run(source_words)):
        return True
    most, usual = (max(Counter(some).values(), default=0) for some in (words, source_words))
    return len(words) >= 8 and most > len(words) / 2 and most > 2 * usual


def _longest_run(words: Sequence[str]) -> int:
    return max((len(list(run)) for _, run in groupby(words)), default=0)
