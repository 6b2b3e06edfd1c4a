"""Cleaning of training pairs while they are read: rules find unsuitable pairs; they are counted or left out.

Shifted stretches: long sentences have long translations. If line n of one file belongs to line n + k of the other, the
lengths agree at that shift, and not without it (Gale and Church 1993, Computational Linguistics 19(1), use the same
fact to align sentences). A text that was prepared for another tool has marks that stand apart or are escaped.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from manyheads.data.lines import ReadReport
from manyheads.extras.cleaning.rules import (
    RULES,
    HeldOut,
    Limits,
    PairBlock,
    Rule,
    SeenPairs,
    Usual,
    parse_limits,
    usual_of,
)
from manyheads.text.sides import guess_language, untagged

if TYPE_CHECKING:
    from manyheads.data.translation.preparing import Pairs, WithoutHeldBack

_APART = re.compile(r"\w [.,](?=\s|\Z)")
_ATTACHED = re.compile(r"\w[.,](?=\s|\Z)")
_ESCAPED = re.compile(r"&(?:apos|quot|amp|lt|gt|#91|#93|#124);|@-@")
_PLAIN = re.compile("['\"&<>]")
LEAST_TEXTS = 2
LEAST_SHARE = 0.01  # of the texts
MOST_OTHERS = 0.05  # plain marks for each escaped one


def how_prepared(texts: Sequence[str]) -> list[str]:
    """Return what is unusual about texts, for people: that they are tokenised, or escaped. Empty for natural text."""
    told = []
    least = max(LEAST_TEXTS, LEAST_SHARE * len(texts))
    apart = [len(_APART.findall(text)) for text in texts]
    with_apart = sum(count > 0 for count in apart)
    if with_apart >= least and sum(apart) > sum(len(_ATTACHED.findall(text)) for text in texts):
        told.append(f"is tokenised (' ,' or ' .' in {with_apart:,} of {len(texts):,} lines); detokenise it")
    escaped = [len(_ESCAPED.findall(text)) for text in texts]
    with_escaped = sum(count > 0 for count in escaped)
    if with_escaped >= least:
        plain = sum(len(_PLAIN.findall(_ESCAPED.sub("", text))) for text in texts)
        if plain <= MOST_OTHERS * sum(escaped):
            told.append(f"is escaped as Moses does it (&quot;, &apos;, @-@ in {with_escaped:,} lines); unescape it")
    return told


Lengths = npt.NDArray[np.int64]
WINDOW = 40  # pairs that are compared at once
MOST_SHIFT = 5
MOST_GAP = 5  # windows
REACH = (MOST_GAP + 2) * WINDOW
"""Pairs before and after a block that determine whether its pairs are in a stretch."""

MARGIN = 0.4  # by which the correlation at another shift must exceed the one in place
HIGH = 0.5  # the correlation that a shift must reach


class MisalignedStretch(tuple[int, int, int]):
    """First and last pair, from 0, and the number of lines by which the target is shifted."""


def misaligned_stretches(source: Lengths, target: Lengths) -> list[MisalignedStretch]:
    """Return the stretches whose lengths agree better at another shift, the same in at least two windows.

    A stretch may include up to `MOST_GAP` windows that show nothing. By chance, one window in a thousand of short
    sentences seems shifted, so a window alone does not count.

    Args: source, target: characters of each sentence, of consecutive pairs.
    """
    found: list[MisalignedStretch] = []
    for first, shift in _windows(np.log1p(source), np.log1p(target)):
        last = min(first + WINDOW, len(source)) - 1
        if found and found[-1][2] == shift and found[-1][1] >= first - 1 - MOST_GAP * WINDOW:
            found[-1] = MisalignedStretch((found[-1][0], last, shift))
        else:
            found.append(MisalignedStretch((first, last, shift)))
    return [one for one in found if one[1] - one[0] + 1 >= 2 * WINDOW]


def _windows(source: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Yield the first pair of each window that is shifted, and its shift."""
    count = len(source) // WINDOW
    if count == 0:
        return
    shape = (count, WINDOW)
    left = source[: count * WINDOW].reshape(shape)
    padded = np.pad(target, MOST_SHIFT, constant_values=np.nan)
    shifts = [0, *(sign * size for size in range(1, MOST_SHIFT + 1) for sign in (1, -1))]
    values = np.stack(
        [_correlation(left, padded[MOST_SHIFT + shift :][: count * WINDOW].reshape(shape)) for shift in shifts]
    )  # (shifts, windows)
    best = values.argmax(0)
    for window in np.flatnonzero((best > 0) & (values.max(0) > HIGH) & (values.max(0) > values[0] + MARGIN)).tolist():
        yield window * WINDOW, shifts[best[window]]


def _correlation(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the correlation in each row; pairs that one side does not have are left out. 0 where it is undefined."""
    known = ~np.isnan(right)
    right = np.where(known, right, 0.0)
    counts = np.maximum(known.sum(1, keepdims=True), 1)
    centred = [np.where(known, side - (side * known).sum(1, keepdims=True) / counts, 0.0) for side in (left, right)]
    product = (centred[0] * centred[1]).sum(1)
    scale = np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    return np.asarray(np.divide(product, scale, out=np.zeros_like(product), where=scale > 1e-9))


BLOCK_PAIRS = 8000  # a multiple of the window of `alignment`, and more than its reach
SAMPLE_PAIRS = 8000  # number of first pairs that determine the usual ratio of lengths and the scripts
MOST_EXAMPLES = 3
MOST_STRETCHES = 5
LONGEST_EXAMPLE = 200

CLEANING_RULES: dict[str, Rule] = RULES | {
    "misaligned": Rule(
        "the lengths of 80 pairs or more agree better when shifted by some lines", lambda one, _: _no(one)
    )
}
"""All rules, in the order in which they count."""


def _no(block: PairBlock) -> Any:
    return np.zeros(len(block.pairs), np.bool_)


@dataclass
class CleaningReport:
    """The pairs that the rules found.

    Attributes:
        num_pairs: pairs that were read.
        counts: name of a rule -> pairs that it found.
        examples: name of a rule -> the first pairs that it found, with their line.
        stretches: first line, last line and shift of each misaligned stretch.
        is_cleaned: the pairs found were left out.
        limits: name of a rule -> its limit; None: it has none. Rules that are off are missing.
        usual: target characters for each source character.
        languages: of source and target, as the first pairs look; None: unknown.
        prepared: what is unusual about the first pairs, see `extras.cleaning.cleaner`.
        duplicates_of_first: only repetitions of so many different pairs were found; 0: of all.
    """

    num_pairs: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stretches: list[tuple[int, int, int]] = field(default_factory=list)
    is_cleaned: bool = False
    limits: dict[str, float | None] = field(default_factory=dict)
    usual: float = 1.0
    languages: tuple[str | None, str | None] = (None, None)
    prepared: list[str] = field(default_factory=list)
    duplicates_of_first: int = 0

    @property
    def num_found(self) -> int:
        return sum(self.counts.values())

    def note(self, name: str, line: int | None, pair: tuple[str, str]) -> None:
        """Count a pair that a rule found. line: None: unknown."""
        self.counts[name] = self.counts.get(name, 0) + 1
        known = self.examples.setdefault(name, [])
        if len(known) < MOST_EXAMPLES:
            source, target = (text if len(text) <= LONGEST_EXAMPLE else text[:LONGEST_EXAMPLE] + "…" for text in pair)
            known.append({"line": line, "source": source, "target": target})

    def to_json(self) -> dict[str, Any]:
        """Return the content of cleaning.json."""
        return {
            "pairs": self.num_pairs,
            "found": self.num_found,
            "left_out": self.num_found if self.is_cleaned else 0,
            "languages": list(self.languages),
            "prepared": self.prepared,
            "usual_length_ratio": round(self.usual, 3),
            **({"duplicates_of_first": self.duplicates_of_first} if self.duplicates_of_first else {}),
            "misaligned": [
                {"first_line": first, "last_line": last, "shift": shift} for first, last, shift in self.stretches
            ],
            "rules": [
                {
                    "name": name,
                    "finds": CLEANING_RULES[name].what,
                    "default": CLEANING_RULES[name].limit,
                    "limit": limit,
                    "count": self.counts.get(name, 0),
                    "examples": self.examples.get(name, []),
                }
                for name, limit in self.limits.items()
            ],
        }


def describe_cleaning(content: Mapping[str, Any]) -> list[str]:
    """Return a summary of a cleaning.json in lines; none if nothing was found."""
    unusual = [f"warning: {what}, or the model will write such text." for what in content.get("prepared", ())]
    if first := content.get("duplicates_of_first"):
        unusual.append(
            f"duplicates are repetitions of the first {first:,} different pairs; others were not looked for."
        )
    is_cleaned = content["left_out"] > 0
    # Pairs with an empty side are left out and counted in any case.
    found = {
        rule["name"]: rule for rule in content["rules"] if rule["count"] and (is_cleaned or rule["name"] != "empty")
    }
    if not found:
        return unusual
    count = sum(rule["count"] for rule in found.values())
    done = "left out" if is_cleaned else "are suspicious, and kept; --clean leaves them out"
    told = [f"cleaning: {count:,} of {content['pairs']:,} training pairs {done} (examples: cleaning.json)"]
    for name, rule in found.items():
        with_limit = "" if rule["limit"] is None else f", limit {rule['limit']:g}"
        told.append(f"  {rule['count']:>13,} {name}{with_limit}: {rule['finds']}")
    for one in content["misaligned"][:MOST_STRETCHES]:
        told.append(f"  {'':>13} lines {one['first_line']:,} to {one['last_line']:,} look shifted by {one['shift']:+d}")
    if "held-out" in found and not is_cleaned:
        told.append("warning: training pairs with sentences of validation or test make its scores too high.")
    return told + unusual


class CleanedPairs:
    """Pairs of another source, without those that the rules find, or with a count of them alone.

    Args:
        pairs: the source, of which each pair is read once.
        clean: leave out what is found.
        limits: of rules, instead of their defaults.
        held_out: validation and test pairs, which are read before the first training pair. Give `RememberedPairs`
            where they cannot be read twice.
        counted: for `without_held_back`: collects the hashes of the pairs that were found and are kept.
    """

    def __init__(
        self,
        pairs: Pairs,
        *,
        clean: bool,
        limits: Limits | None = None,
        held_out: Sequence[Pairs] = (),
        counted: array[int] | None = None,
    ) -> None:
        self._pairs, self._counted = pairs, counted
        self._held_out = held_out
        chosen = {name: rule.limit for name, rule in CLEANING_RULES.items()} | (limits or {})
        off = {name for name, limit in (limits or {}).items() if limit is None}
        self._limits = {name: limit for name, limit in chosen.items() if name not in off}
        self._clean = clean
        self.report = self._new_report()

    def describe(self) -> str:
        return self._pairs.describe()

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        found = self.report = self._new_report()
        numbered = self._numbered(ReadReport() if report is None else report)
        sample = list(islice(numbered, SAMPLE_PAIRS))
        usual = usual_of([pair for _, pair in sample])
        held_out = HeldOut([list(each.read()) for each in self._held_out])
        found.usual = usual.ratio
        source, target = (guess_language(pair[side] for _, pair in sample) for side in (0, 1))
        found.languages = source, target
        for side, name in enumerate(("source", "target")):
            found.prepared += [f"the {name} {how}" for how in how_prepared([pair[side] for _, pair in sample])]
        seen = SeenPairs()
        blocks = _blocks(chain(sample, numbered), usual, held_out, seen)
        del sample
        before: PairBlock | None = None
        block = next(blocks, None)
        while block is not None:
            after = next(blocks, None)
            marks = self._marks(before, block, after)
            for place in np.flatnonzero(marks >= 0).tolist():
                name = list(self._limits)[marks[place]]
                found.note(name, block.lines[place], block.pairs[place])
                if self._counted is not None and not self._clean:
                    self._counted.append(_hash(block.pairs[place]))
            found.num_pairs += len(block.pairs)
            if self._clean:
                yield from (block.pairs[place] for place in np.flatnonzero(marks < 0).tolist())
            else:
                yield from block.pairs
            before, block = block, after
        found.duplicates_of_first = seen.full_at

    def without_held_back(
        self, pairs: Iterable[tuple[str, str]], held_back: Sequence[tuple[str, str]]
    ) -> Iterator[tuple[str, str]]:
        """Apply the rule `held-out` to the pairs again, with validation pairs that were chosen after all were read.

        A pair that another rule has found is not counted again.

        Args: pairs: what `read` has yielded, without the others. held_back: the validation pairs.
        """
        held_out = HeldOut([held_back] if "held-out" in self._limits else [])
        hashes, counts = np.unique(np.array(self._counted or (), np.int64), return_counts=True)

        def was_counted(pair: tuple[str, str]) -> bool:
            place = np.searchsorted(hashes, _hash(pair))
            if place == len(hashes) or hashes[place] != _hash(pair) or not counts[place]:
                return False
            counts[place] -= 1
            return True

        for pair in held_back:
            was_counted(pair)
        for pair in pairs:
            is_found = held_out.has(*pair)
            if is_found and not was_counted(pair):
                self.report.note("held-out", None, pair)
            if not (is_found and self._clean):
                yield pair

    def _numbered(self, report: ReadReport) -> Iterator[tuple[int, tuple[str, str]]]:
        """Yield each pair with its line; lines that are not UTF-8 and left out have numbers, too."""
        before = report.lines
        for pair in self._pairs.read(report):
            yield report.lines - before, pair

    def _marks(self, before: PairBlock | None, block: PairBlock, after: PairBlock | None) -> Any:
        """Return for each pair of a block the number of the first rule that finds it, or -1."""
        marks = np.full(len(block.pairs), -1)
        for number, (name, limit) in enumerate(self._limits.items()):
            if name == "misaligned":
                which = self._misaligned(block.lines, _chars(before), _chars(block), _chars(after))
            else:
                which = CLEANING_RULES[name].find(block, 0.0 if limit is None else limit)
            marks[which & (marks < 0)] = number
        return marks

    def _misaligned(self, lines: Sequence[int], before: Any, chars: Any, after: Any) -> Any:
        """Return which pairs are in a misaligned stretch, which may begin in the block before or end in the next one.

        Args: lines: of its pairs. before, chars, after: characters of the sentences of these blocks, for each side.
        """
        which = np.zeros(len(lines), np.bool_)
        stretches, start = self.report.stretches, len(before[0][-REACH:])
        both = [np.concatenate([b[-REACH:], now, a[:REACH]]) for b, now, a in zip(before, chars, after, strict=True)]
        for first, last, shift in misaligned_stretches(*both):
            low, high = max(first - start, 0), min(last - start, len(lines) - 1)
            if low <= high:
                which[low : high + 1] = True
                line = lines[low] if first >= start else stretches.pop()[0]  # it was in the block before
                stretches.append((line, lines[high], shift))
        return which

    def _new_report(self) -> CleaningReport:
        return CleaningReport(is_cleaned=self._clean, limits=dict(self._limits))


def _hash(pair: tuple[str, str]) -> int:
    return hash((untagged(pair[0])[0], pair[1]))


def _blocks(
    numbered: Iterator[tuple[int, tuple[str, str]]], usual: Usual, held_out: HeldOut, seen: SeenPairs
) -> Iterator[PairBlock]:
    """Yield the pairs, each with its line, in blocks."""
    while read := list(islice(numbered, BLOCK_PAIRS)):
        lines, part = zip(*read, strict=True)
        yield PairBlock(part, usual, seen, held_out, lines)


def _chars(block: PairBlock | None) -> list[Any]:
    """Return the characters of the sentences of each side; none without a block."""
    return [np.zeros(0, np.int64)] * 2 if block is None else [side.chars for side in block.sides]


class Cleaning:
    """The cleaning of all training pairs of one `prepare`.

    Args:
        clean: leave out what is found.
        limits: of rules, see `parse_limits`.
        holds_back: validation pairs are chosen after all training pairs were read.

    Raises: ConfigError: see `parse_limits`.
    """

    def __init__(self, *, clean: bool, limits: Sequence[str], holds_back: bool) -> None:
        self._clean, self._limits = clean, parse_limits(limits, CLEANING_RULES)
        self._counted = array("q") if holds_back else None
        self._cleaned: list[CleanedPairs] = []

    def of(self, pairs: Pairs, held_out: Sequence[Pairs]) -> CleanedPairs:
        """Return pairs of a source without those that the rules find, or with a count of them alone."""
        made = CleanedPairs(pairs, clean=self._clean, limits=self._limits, held_out=held_out, counted=self._counted)
        self._cleaned.append(made)
        return made

    @property
    def without_held_back(self) -> WithoutHeldBack | None:
        """See `CleanedPairs.without_held_back`, of all sources; None: nothing is held back."""
        return None if self._counted is None else self._cleaned[0].without_held_back

    def to_json(self) -> dict[str, Any]:
        """Return the content of cleaning.json. Of several sources counts are summed, and the first examples kept."""
        each = [one.report.to_json() for one in self._cleaned]
        if len(each) == 1:
            return each[0]
        rules = each[0]["rules"]
        for others in each[1:]:
            for rule, other in zip(rules, others["rules"], strict=True):
                rule["count"] += other["count"]
                rule["examples"] = [*rule["examples"], *other["examples"]][:MOST_EXAMPLES]
        return {
            **{name: value for one in each for name, value in one.items()},
            **{name: sum(one[name] for one in each) for name in ("pairs", "found", "left_out")},
            "languages": [None, None],  # several
            "prepared": list(dict.fromkeys(what for one in each for what in one["prepared"])),
            "misaligned": [stretch for one in each for stretch in one["misaligned"]],
            "rules": rules,
        }
