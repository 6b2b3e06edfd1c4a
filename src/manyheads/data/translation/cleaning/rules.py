"""The rules: each has a name, a limit that can be changed, and says which pairs of a block it finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from manyheads.data.translation.cleaning.block import SideBlock
from manyheads.data.translation.cleaning.numbers import numbers_differ
from manyheads.errors import ConfigError
from manyheads.text.sides import untagged

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


def _is_long(text: str) -> bool:
    return text.count(" ") >= 3 or (" " not in text and len(text) >= 12)


@dataclass
class PairBlock:
    """Some pairs in order.

    usual: found in the first pairs of the data. seen: hashes of the pairs before. held_out: what is in validation and
    test. lines: of the pairs.
    """

    pairs: Sequence[tuple[str, str]]
    usual: Usual
    seen: set[int] = field(default_factory=set)
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
    found = []
    for pair in block.pairs:
        key = hash(pair)
        found.append(key in block.seen)
        block.seen.add(key)
    return np.array(found, np.bool_)


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
