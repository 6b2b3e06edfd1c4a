"""Pairs of several directions, one after another, whose sources begin with the tag of the target language."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manyheads.data.lines import ReadReport
from manyheads.data.translation.cleaning.cleaner import CleaningReport
from manyheads.data.translation.preparing import Pairs
from manyheads.errors import DataError
from manyheads.text.languages import LanguagePair
from manyheads.text.sides import tagged

Direction = tuple[str, str, int]
"""Source, target, and the number of pairs of a stretch of a split."""


class TaggedPairs:
    """See `preparing_pairs.Pairs`.

    Args: parts: the direction of each part, and its pairs.

    Attributes: directions: of the stretches that were read, in order.
    """

    def __init__(self, parts: Sequence[tuple[LanguagePair, Pairs]]) -> None:
        self._parts = parts
        self.directions: list[Direction] = []

    @property
    def languages(self) -> tuple[LanguagePair, ...]:
        """Each direction once."""
        return tuple(dict.fromkeys(pair for pair, _ in self._parts))

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """Yield the pairs of all parts, with tags."""
        self.directions = []
        for (source, target), pairs in self._parts:
            count = 0
            for text, translation in pairs.read(report):
                count += 1
                yield tagged(text, target), translation
            self.directions.append((source, target, count))

    def describe(self) -> str:
        """Return the directions with their files."""
        return "; ".join(f"{source} > {target}: {pairs.describe()}" for (source, target), pairs in self._parts)


def directions_of(manifest: Mapping[str, Any], split: str, num_pairs: int) -> list[tuple[LanguagePair, slice]]:
    """Return the direction of each stretch of a split, as the manifest of prepared data records them.

    Args: num_pairs: of the split.

    Returns: empty for data of one direction.
    Raises: DataError: the record does not cover the split.
    """
    stretches = manifest.get("directions", {}).get(split, [])
    found, first = [], 0
    for source, target, count in stretches:
        found.append(((source, target), slice(first, first + count)))
        first += count
    if stretches and first != num_pairs:
        raise DataError(
            f"manifest.json is damaged: its directions of {split} have {first} pairs, but the split {num_pairs}."
            " Prepare the data again."
        )
    return found


class ManyCleanings:
    """The cleaning of several sources of pairs, as one report; lines are those of each source.

    Args: reports: of each.
    """

    def __init__(self, reports: Sequence[CleaningReport]) -> None:
        self._reports = reports

    def to_json(self) -> dict[str, Any]:
        """Return the content of cleaning.json: counts are summed; the first examples are kept."""
        each = [report.to_json() for report in self._reports]
        rules = each[0]["rules"]
        for others in each[1:]:
            for rule, other in zip(rules, others["rules"], strict=True):
                rule["count"] += other["count"]
                rule["examples"] = [*rule["examples"], *other["examples"]][:3]
        return {
            **each[0],
            **{name: sum(one[name] for one in each) for name in ("pairs", "found", "left_out")},
            "languages": [None, None],  # several
            "prepared": list(dict.fromkeys(what for one in each for what in one["prepared"])),
            "misaligned": [stretch for one in each for stretch in one["misaligned"]],
            "rules": rules,
        }
