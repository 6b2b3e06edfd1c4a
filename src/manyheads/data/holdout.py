"""Validation pairs for a corpus that has none: the end of the training pairs is held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from manyheads.data.lines import ReadReport
from manyheads.data.preparing_pairs import Pairs
from manyheads.errors import ConfigError, DataError

__all__ = ["Holdout", "Rest"]


class Rest:
    """All pairs but the last `count` usable ones, which `holdout` gives once these have been read.

    The end, and not a random choice: neighbouring sentences of a document then stay on one side.

    Args:
        pairs: where all of them come from; read once, as a stream.
        count: how many pairs with text on both sides are held back.

    Raises: ConfigError: count is below 1.
    """

    def __init__(self, pairs: Pairs, count: int) -> None:
        if count < 1:
            raise ConfigError(f"{count} pairs are to be held back for validation; hold back at least 1.")
        self._pairs = pairs
        self._count = count
        self._last: deque[tuple[str, str]] = deque()
        self.holdout = Holdout(self, self._last)

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """The pairs in order; pairs with an empty side pass through at once.

        Raises: DataError: no pair is left to train on; else as the pairs' own `read`.
        """
        self._last.clear()
        num_usable = 0
        for source, target in self._pairs.read(report):
            if not source.strip() or not target.strip():
                yield source, target
                continue
            num_usable += 1
            self._last.append((source, target))
            if len(self._last) > self._count:
                yield self._last.popleft()
        if num_usable <= self._count:
            raise DataError(
                f"{self._pairs.describe()} has {num_usable} pairs with text on both sides; with {self._count} held"
                " back for validation none is left to train on. Hold back fewer."
            )

    def describe(self) -> str:
        """The files' names, and what is missing of them."""
        return f"{self._pairs.describe()} without the last {self._count} pairs"


class Holdout:
    """The pairs that a `Rest` held back."""

    def __init__(self, rest: Rest, pairs: deque[tuple[str, str]]) -> None:
        self._rest = rest
        self._held = pairs

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """The pairs in order; empty before the others have been read to their end."""
        for pair in self._held:
            if report is not None:
                report.lines += 1
            yield pair

    def describe(self) -> str:
        """Where they were."""
        return f"held back: {self._rest.describe()}"
