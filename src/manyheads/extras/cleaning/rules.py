"""The rules: each has a name, a limit that can be changed, and says which pairs of a block it finds."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manyheads.errors import ConfigError
from manyheads.text.sides import untagged

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


# Digits of any script; between them one separator of groups, of decimals, or of hours and minutes.
_NUMBER = re.compile(r"\d+(?:(?:[.,:'’\u066b\u066c \u00a0\u2009\u202f]|\s?h\s?)\d+)*")
_DIGITS = re.compile(r"\d+")
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_THOUSANDS = re.compile(r"(?<=\d)(?:000)+\Z")
_YEAR = re.compile(r"[12]\d{3}")
_HALF_OF_DAY = re.compile(r"\d\s?(?:[ap]\.?\s?m\b|o['’]clock)", re.IGNORECASE)


class _Number(NamedTuple):
    """A number as it can be read.

    whole: all digits together, without thousands that are only zeros: 10,000 is 10.
    parts: the digits between separators, without zeros in front: those of at least two digits, and the hour of a time.
    digits: all digits without zeros at the end.
    is_decimal: at most two digits are behind the last separator.
    is_time: there are two parts, and the second has two digits.
    """

    whole: str
    parts: list[str]
    digits: str
    is_decimal: bool
    is_time: bool


def numbers_differ(source: str, target: str) -> bool:
    """Return whether each text has a number of at least two digits that is in no reading a number of the other.

    So 1,500 is 1500, 1 500 and 1.5; ३० is 30; 90 is 1990; 15:30 is 3.30; and a date has the same day, month and year in
    whatever order. What is in one text alone, as a number that the other has in words, is no difference.
    """
    first, second = _numbers_in(source), _numbers_in(target)
    hours = any(_HALF_OF_DAY.search(text) for text in (source, target))
    return _has_another(first, second, hours) and _has_another(second, first, hours)


def _numbers_in(text: str) -> list[_Number]:
    if not text.isascii():
        text = _OTHER_DIGIT.sub(lambda found: str(unicodedata.decimal(found[0])), text)
    found = []
    for one in _NUMBER.findall(text):
        runs = _DIGITS.findall(one)
        whole = "".join(runs).lstrip("0") or "0"
        if sum(map(len, runs)) > 1:
            is_time = len(runs) == 2 and len(runs[1]) == 2
            parts = [run.lstrip("0") for run in runs if (len(run) > 1 or is_time) and run.strip("0")]
            is_decimal = len(runs) > 1 and len(runs[-1]) < 3
            found.append(_Number(_THOUSANDS.sub("", whole), parts, whole.rstrip("0"), is_decimal, is_time))
    return found


def _has_another(numbers: list[_Number], others: list[_Number], hours: bool) -> bool:
    """Return whether a number is not among others. hours: 3 and 15 can be the same."""
    known = {part for other in others for part in (*other.parts, other.whole)}
    decimals = {other.digits for other in others if other.is_decimal}
    digits = {other.digits for other in others}
    years = {part[2:].lstrip("0") for part in known if _YEAR.fullmatch(part)}
    times = {
        str(int(part) % 12 or 12)
        for other in others
        if hours or other.is_time
        for part in other.parts
        if len(part) < 3 and int(part) < 25
    }
    found = known | years | times
    return not all(
        number.whole in known
        or number.digits in (digits if number.is_decimal else decimals)
        or all(
            part in found or (_YEAR.fullmatch(part) and part[2:].lstrip("0") in known)
            for part in number.parts or [number.whole]
        )
        for number in numbers
    )


Found = npt.NDArray[np.bool_]
MARKUP = re.compile(r"</?[a-zA-Z][^<>]*>|<!--|&(?:[a-zA-Z]{2,8}|#\d+);|\{\{|\]\]|\[\[")
LENGTH_ROOM = 15  # short sentences may differ by this many characters, at any ratio


@dataclass(frozen=True)
class Usual:
    """Statistics of the data: target characters for each source character, and the number of each side's script."""

    ratio: float
    scripts: tuple[int, int]


class HeldOut:
    """The pairs of validation and test, and their sentences of at least 4 words (or 12 characters without spaces).

    A shorter sentence, as "Thank you.", is in every text; it counts only together with its translation. A source that
    begins with the tag of a target language counts for that language only.

    Args: splits: the pairs of each split.
    """

    def __init__(self, splits: Collection[Sequence[tuple[str, str]]]) -> None:
        self.num_pairs = sum(map(len, splits))
        self._known: set[int] = set()
        for pairs in splits:
            for source, target in pairs:
                source, target = source.strip(), target.strip()
                if source and target:
                    self._known.add(hash((source, target)))
                for side, text in enumerate((source, target)):
                    if _is_long(untagged(text)[0]):
                        self._known.add(hash((side, text)))

    def has(self, source: str, target: str) -> bool:
        """Return whether a training pair is one of these pairs, or one of its sides is a long sentence of them."""
        source, target = source.strip(), target.strip()
        return (
            hash((0, source)) in self._known
            or hash((1, target)) in self._known
            or hash((source, target)) in self._known
        )


MOST_SEEN = 2**24


class SeenPairs:
    """The hashes of MOST_SEEN different pairs, those that came first: memory does not grow with the corpus.

    Attributes: full_at: MOST_SEEN, if others came later, which are not found again; otherwise 0.
    """

    def __init__(self) -> None:
        self._runs: list[npt.NDArray[np.int64]] = []  # each sorted, and at least twice as long as the next one
        self.full_at = 0

    def find(self, pairs: Sequence[tuple[str, str]]) -> Found:
        """Return which pairs came before, also among these, and remember them."""
        keys = np.array([hash(pair) for pair in pairs], np.int64)
        found = np.ones(len(keys), np.bool_)
        found[np.unique(keys, return_index=True)[1]] = False
        for run in self._runs:
            found |= run[np.minimum(np.searchsorted(run, keys), len(run) - 1)] == keys
        new, room = keys[~found], MOST_SEEN - sum(map(len, self._runs))
        self.full_at = MOST_SEEN if len(new) > room else self.full_at
        if len(new[:room]):
            self._runs.append(np.sort(new[:room]))
        while len(self._runs) > 1 and 2 * len(self._runs[-1]) > len(self._runs[-2]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]))]
        return found


def _is_long(text: str) -> bool:
    return text.count(" ") >= 3 or (" " not in text and len(text) >= 12)


@dataclass
class PairBlock:
    """Some pairs in order.

    usual: found in the first pairs of the data. seen: the pairs before. held_out: what is in validation and
    test. lines: of the pairs.
    """

    pairs: Sequence[tuple[str, str]]
    usual: Usual
    seen: SeenPairs = field(default_factory=lambda: SeenPairs())
    held_out: HeldOut | None = None
    lines: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.sides = tuple(SideBlock([pair[side] for pair in self.pairs]) for side in (0, 1))

    def each(self, test: Callable[[str, str], bool], which: Found | None = None) -> Found:
        """Return which pairs pass a test, of those marked."""
        found = np.zeros(len(self.pairs), np.bool_)
        places = range(len(self.pairs)) if which is None else np.flatnonzero(which).tolist()
        for place in places:
            found[place] = test(*self.pairs[place])
        return found


@dataclass(frozen=True)
class Rule:
    """A rule.

    Args:
        what: of the pairs that it finds, for people.
        limit: its default; None: it has none.
        lowest, highest: of the limit.
        find: the block and the limit -> which pairs are found.
    """

    what: str
    find: Callable[[PairBlock, float], Found]
    limit: float | None = None
    lowest: float = 0
    highest: float = 0


def _empty(block: PairBlock, limit: float) -> Found:
    source, target = block.sides
    return np.asarray((source.chars == source.spaces) | (target.chars == target.spaces))


def _identical(block: PairBlock, limit: float) -> Found:
    return np.array([source == target for source, target in block.pairs], np.bool_)


def _duplicate(block: PairBlock, limit: float) -> Found:
    return block.seen.find(block.pairs)


def _held_out(block: PairBlock, limit: float) -> Found:
    held_out = block.held_out
    if held_out is None or not held_out.num_pairs:
        return np.zeros(len(block.pairs), np.bool_)
    return np.array([held_out.has(source, target) for source, target in block.pairs], np.bool_)


def _length(block: PairBlock, limit: float) -> Found:
    source, target = block.sides
    words = np.maximum(source.spaces, target.spaces) + 1
    # Languages without spaces: three characters are about a word.
    return (words > limit) | (np.maximum(source.chars, target.chars) > 12 * limit)


def _ratio(block: PairBlock, limit: float) -> Found:
    source, target = block.sides[0].chars * block.usual.ratio, block.sides[1].chars
    long, short = np.maximum(source, target), np.minimum(source, target)
    return np.asarray(long > limit * short + LENGTH_ROOM)


def _letters(block: PairBlock, limit: float) -> Found:
    shares = [side.letters < limit * np.maximum(side.chars - side.spaces, 1) for side in block.sides]
    return np.asarray(shares[0] | shares[1])


def _script(block: PairBlock, limit: float) -> Found:
    found = [
        side.letters_of(script) < limit * side.letters_with_script()
        for side, script in zip(block.sides, block.usual.scripts, strict=True)
    ]
    return np.asarray(found[0] | found[1])


def _numbers(block: PairBlock, limit: float) -> Found:
    source, target = block.sides
    return block.each(numbers_differ, (source.digits > 1) & (target.digits > 1))


def _markup(block: PairBlock, limit: float) -> Found:
    suspicious = np.zeros(len(block.pairs), np.bool_)
    for side in block.sides:
        for char in "<&{[":
            suspicious |= side.has(char)
    return block.each(lambda *texts: any(MARKUP.search(text) for text in texts), suspicious)


RULES: dict[str, Rule] = {
    "empty": Rule("a side is empty", _empty),
    "identical": Rule("both sides are the same text", _identical),
    "duplicate": Rule("the same pair came before", _duplicate),
    "held-out": Rule("the pair, or a side of at least 4 words, is in validation or test", _held_out),
    "length": Rule("a side has more words than the limit (or 12 times as many characters)", _length, 200, 1, 100_000),
    "ratio": Rule(
        "a side is longer than the limit times the other side, as its language usually is", _ratio, 3, 1, 1000
    ),
    "letters": Rule("the share of letters in a side is below the limit", _letters, 0.4, 0, 1),
    "script": Rule("the share of letters in the side's usual script is below the limit", _script, 0.5, 0, 1),
    "numbers": Rule("each side has a number that the other side has not", _numbers),
    "markup": Rule("a side contains a tag, an entity or a template", _markup),
}
"""Rules in the order in which they are applied: a pair counts for the first rule that finds it.

`misaligned` is applied last.
"""

Limits = dict[str, float | None]
"""Name of a rule -> its limit, or None: it is off. Rules without an entry have their default."""


def parse_limits(texts: Sequence[str], names: Mapping[str, Rule]) -> Limits:
    """Return the limits of `NAME=NUMBER` or `NAME=off`.

    Raises: ConfigError: an unknown rule, a limit out of range, or a limit for a rule that has none.
    """
    limits: Limits = {}
    for text in texts:
        name, _, value = text.partition("=")
        rule = names.get(name)
        if rule is None:
            raise ConfigError(f"--clean-rule {text}: there is no rule {name!r}; the rules are {', '.join(names)}.")
        if value == "off":
            limits[name] = None
            continue
        if rule.limit is None:
            raise ConfigError(f"--clean-rule {text}: the rule {name} has no limit; {name}=off turns it off.")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not rule.lowest <= number <= rule.highest:
            raise ConfigError(
                f"--clean-rule {text}: give a number from {rule.lowest:g} to {rule.highest:,g}, or off; the default is"
                f" {rule.limit:g}."
            )
        limits[name] = number
    return limits


def usual_of(pairs: Sequence[tuple[str, str]]) -> Usual:
    """Return the usual ratio and scripts of some pairs; an empty list gives a ratio of 1 and Latin letters."""
    filled = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
    if not filled:
        return Usual(1.0, (0, 0))
    source, target = (SideBlock([pair[side] for pair in filled]) for side in (0, 1))
    ratios = target.chars / np.maximum(source.chars, 1)
    return Usual(float(np.median(ratios)), (source.usual_script(), target.usual_script()))
