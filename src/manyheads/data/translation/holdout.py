"""Validation pairs for a corpus that has none: the last training pairs are held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from manyheads.data.lines import ReadReport
from manyheads.data.translation.preparing import PairList, Pairs
from manyheads.errors import ConfigError, DataError
from manyheads.text.words import is_blank


class Rest:
    """All pairs except the last `count` usable ones. After these have been read, `holdout` contains the others.

    The last pairs, not a random choice, because then neighbouring sentences of a document stay in one split.

    Args:
        pairs: all pairs; read once, as a stream.
        count: number of pairs with text on both sides to hold back.

    Attributes: holdout: the pairs held back; empty until the others have been read completely.

    Raises: ConfigError: count is below 1.
    """

    def __init__(self, pairs: Pairs, count: int) -> None:
        if count < 1:
            raise ConfigError(f"{count} pairs are to be held back for validation; hold back at least 1.")
        self._pairs = pairs
        self._count = count
        self._last: deque[tuple[str, str]] = deque()
        self.holdout = PairList(f"held back: {self.describe()}", self._last)

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """Yield the pairs in order; pairs with an empty side are never held back.

        Raises: DataError: no pair is left to train on; see also the `read` of the pairs.
        """
        self._last.clear()
        num_usable = 0
        for source, target in self._pairs.read(report):
            if is_blank(source) or is_blank(target):
                yield source, target
                continue
            num_usable += 1
            self._last.append((source, target))
            if len(self._last) > self._count:
                yield self._last.popleft()
        if num_usable <= self._count:
            raise DataError(
                f"{self._pairs.describe()} has {num_usable} pairs with text on both sides; with {self._count} held"
                " back for validation, none is left to train on. Hold back fewer."
            )

    def describe(self) -> str:
        """Return the names of the files, and how many pairs are missing."""
        return f"{self._pairs.describe()} without the last {self._count} pairs"
