"""Boundaries of words, also next to scripts without spaces, and things that are not words of a language.

`\\w` matches the letters of Chinese, Japanese and Thai too: `\\bURL` does not match in `访问URL`, and a word of such a
script seldom stands between borders.

Translations contain addresses, numbers, code and emoji unchanged. While a text is translated, a private character
(plane 15) stands for each of them. docs/kept-words.md lists them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

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


PRIVATE = 0xF0000
"""First of the private characters. Texts hardly ever contain one."""
MAX_KEPT = 0x1000
"""Words that can be kept in one text."""

_PLAIN = rf"[^\s<>\"'(){WIDE_SIGNS}]"
_IN_URL = rf"(?:{_PLAIN}|\({_PLAIN}*\))"
# The last character is no punctuation, which belongs to the sentence.
_ENDS_URL = rf"(?:[^\s<>\"'(){WIDE_SIGNS}.,;:!?\]}}]|\({_PLAIN}*\))"
_ENDS_PATH = r"(?<![.,;:!?)\]])"
_DOMAINS = "com|org|net|edu|gov|info|io|dev|app|eu|de|at|ch|uk|fr|es|it|nl|pl|ru|cn|jp|kr|in|br|us|ca|au"
_FILES = (
    "txt|md|pdf|docx?|xlsx?|pptx?|csv|tsv|jsonl?|ya?ml|xml|html?|css|jpe?g|png|gif|svg|mp[34]|zip|tar|gz|exe|py|js|sh"
)
_PICTURE = r"[\u203C\u2049\u2139\u2194-\u21AA\u231A-\u23FF\u25AA-\u27BF\u2934\u2935\u2B05-\u2B55\U0001F000-\U0001FAFF]"
_SHAPE = r"[\uFE0E\uFE0F]?[\U0001F3FB-\U0001F3FF]?[\U000E0020-\U000E007F]*"
_EMOJI = rf"(?:{_PICTURE}{_SHAPE}(?:\u200D{_PICTURE}{_SHAPE})*|[0-9#*]\uFE0F?\u20E3)"

_KINDS = (
    rf"{BEFORE}(?:https?|ftp|file|ssh|git)://{_IN_URL}*{_ENDS_URL}",
    rf"{BEFORE}(?<![.+-])(?:mailto:)?(?:{LETTER}|[.+-])+@(?:{LETTER}|-)+(?:\.(?:{LETTER}|-)+)+",  # an e-mail address
    rf"{BEFORE}www\.(?:{LETTER}|-)+\.{_IN_URL}*{_ENDS_URL}",
    rf"{BEFORE}(?<![.-])(?:[a-zA-Z0-9_-]+\.)+(?:(?:{_DOMAINS})(?:/{_IN_URL}*{_ENDS_URL})?|{_FILES}){AFTER}(?!\.{LETTER})",
    r"\{\{[^{}]*\}\}|\{%[^{}]*%\}|[$#]\{[^{}]*\}|\{[\w.:,#!-]*\}",  # {{ name }} {% if x %} ${name} #{name} {0:.2f}
    rf"%\(\w+\)[-#0-9.]*[a-zA-Z]|%(?:\d+\$)?[-+#0-9.]*[sdifgxXeEcu@](?!%){AFTER}|%\d(?!\d)|%[A-Z][A-Z0-9_]*%",
    r"\[\[[^\[\]]*\]\]|\$[a-zA-Z_]\w*",  # [[Page]] $count
    r"</?[a-zA-Z][^<>]*>|</?\d+/?>",  # <name>, <a href="x">, <0>
    r"&(?:\#\d+|\#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]+);",
    rf"(?<![\w@/.])@{LETTER}{{2,}}|(?<![\w&#/])#(?:{LETTER}|-)+",  # @alice #123
    rf"(?<![\w:)\]]):[a-z_+-][\w+-]*:(?![\w:])|(?<![\w:)\]]):[a-z_]{LETTER}+",  # :tada: :name
    rf"{BEFORE}(?<!-)--[a-z](?:{LETTER}|-)*",  # --option
    rf"{BEFORE}{LETTER}*[a-zA-Z0-9]_{LETTER}+(?:\(\))?",  # snake_case
    rf"{BEFORE}[a-zA-Z]:\\{_IN_URL}*{_ENDS_PATH}",  # C:\folder\file
    rf"(?<![\w/.~])(?:~|\.{{1,2}})?/(?:[\w.-]+/)+[\w.-]*{_ENDS_PATH}",  # /usr/bin/env
    r"(?<![\w.,+-])\d{4}-\d{1,2}-\d{1,2}(?:T[\d:.]*\d(?:Z|[+-][\d:]*\d)?)?(?![\w-])",  # 2020-01-01
    r"(?<![\w.,/-])(?:\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{4}[./]\d{1,2}[./]\d{1,2})(?![\w/]|[.,]\d)",  # 1.2.2020 1/2/2020
    r"(?<!\w)\+\d(?:[ ()/.-]{0,3}\d){5,}(?!\w)|(?<![\w.,-])(?<!\d )\(?0\d+\)?(?:[ /-]{1,3}\d+)+(?![\w-])",  # telephone
    r"(?<![\w.,-])(?:\d{2,}(?:-\d{2,})+|\d+(?:-\d+){2,})(?![\w-])",  # 555-1234, 978-3-16
    r"(?<![\w.])v?\d+(?:\.\d+){2,}(?![\w])|(?<![\w.,])\d{5,}(?![\w]|[.,]\d)",
    rf"{BEFORE}(?:{LETTER}|[+/=-]){{200,}}+",  # data: base64, a hash, a sequence
)
KEPT = re.compile(rf"(?P<loose>{_EMOJI}+)|" + "|".join(_KINDS))
"""Loose ones are no part of a sentence's grammar."""


def kept_index(char: str) -> int | None:
    """Return the index of the kept word that a private character stands for; None for other characters."""
    index = ord(char) - PRIVATE
    return index % MAX_KEPT if 0 <= index < 2 * MAX_KEPT else None


def private(index: int, loose: bool = False) -> str:
    """Return the character that stands for the kept word of an index."""
    return chr(PRIVATE + index + MAX_KEPT * loose)


def is_loose(char: str) -> bool:
    """Whether a private character stands for something that is no part of a sentence's grammar, such as an emoji."""
    return PRIVATE + MAX_KEPT <= ord(char) < PRIVATE + 2 * MAX_KEPT


def with_letters(text: str) -> str:
    """Return a text with a letter for each kept word."""
    return "".join("X" if kept_index(char) is not None else char for char in text)


def has_words(text: str) -> bool:
    """Whether there is a letter to translate. text: with private characters in place of kept words."""
    return any(map(str.isalpha, text))


def hide(text: str) -> tuple[str, list[str]]:
    """Return a text with private characters in place of kept words, and these words.

    A text that already has private characters, or too many such words, is returned as it is.
    """
    words = [found[0] for found in KEPT.finditer(text)]
    if not words or len(words) > MAX_KEPT or any(ord(char) >= PRIVATE for char in text):
        return text, []
    chars = (private(index, bool(found["loose"])) for index, found in enumerate(KEPT.finditer(text)))
    return KEPT.sub(lambda _: next(chars), text), words


def unhide(text: str, words: Iterable[str]) -> str:
    """Return a text with its kept words in place of the private characters."""
    own = list(words)
    return "".join(char if (index := kept_index(char)) is None or index >= len(own) else own[index] for char in text)
