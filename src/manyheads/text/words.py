"""Boundaries of words, also next to scripts that are written without spaces, such as Chinese, Japanese and Thai.

`\\w` matches their letters too: `\\bURL` does not match in `访问URL`, and a word of such a script seldom stands
between borders.
"""

from __future__ import annotations

import re
import unicodedata

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Japanese syllables
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
WIDE_SIGNS = "\u3000-\u3004\u3008-\u301f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
"""Punctuation of Chinese and Japanese, for a class of characters."""
LETTER = rf"[^\W{_UNSPACED}]"
"""A letter, digit or underscore of a script that is written with spaces."""
BEFORE, AFTER = rf"(?<!{LETTER})", rf"(?!{LETTER})"
"""No such letter stands before, or after."""
_SHOW_NOTHING = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {*map(chr, range(0xFE00, 0xFE10))}
_SPACES = str.maketrans(dict.fromkeys(" \t\n\r\v\f", " "))
_IS_UNSPACED = re.compile(f"[{_UNSPACED}]")


def begins(phrase: str, *, any_case: bool = False) -> str:
    """Return a pattern of a phrase where a word begins; a phrase of a script without spaces can begin anywhere.

    Args: any_case: of the phrase alone: as a flag of the whole pattern it makes the classes of letters slow to compile.
    """
    own = f"(?i:{re.escape(phrase)})" if any_case else re.escape(phrase)
    return ("" if _IS_UNSPACED.match(phrase) else BEFORE) + own


def stands(phrase: str, *, any_case: bool = False) -> str:
    """Return a pattern of a phrase as whole words; see `begins`."""
    return begins(phrase, any_case=any_case) + ("" if _IS_UNSPACED.match(phrase[-1:]) else AFTER)


def is_blank(text: str) -> bool:
    """Return whether a text holds nothing but white space, control characters and characters without width."""
    return all(char.isspace() or char in _SHOW_NOTHING or unicodedata.category(char) in ("Cc", "Cf") for char in text)


def words_of(sentence: str) -> list[str]:
    """Return the words of a tokenised sentence. Unlike `str.split`, keep no-break spaces inside words, as in trees."""
    return [word for word in sentence.translate(_SPACES).split(" ") if word]
