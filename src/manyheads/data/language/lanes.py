"""The positions that each lane of a language model's batch reads, computed from the number of the row in the epoch.

There is no state between rows, so a run can resume at any row.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 3.2. Differs: the official code divides the tokens among the lanes, so
the first token of every lane except one is never predicted. Here the targets are divided, and each is predicted once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyheads.data.sampler import mix
from manyheads.seeding import derive_seed

IntArray = NDArray[np.int64]

STANDARD_DEVIATION = 5
SHORTEST = 5
MOST_ABOVE = 15  # tokens above segment_len: three standard deviations
HALF_SHARE = 0.05  # fraction of segments that are about half as long
DRAW_BITS = 53


@dataclass(frozen=True)
class RowSpans:
    """The positions that one row of a plan reads.

    Attributes:
        starts: (lanes,) position of the first token that each lane predicts.
        lengths: (lanes,) number of tokens it predicts; 0 at the end of its text.
        resets: (lanes,) whether the lane's memory is cleared before the row.
        context: number of tokens before the first that are read again, the same in all lanes.
    """

    starts: IntArray
    lengths: IntArray
    resets: NDArray[np.bool_]
    context: int = 0


def equal_lanes(first: int, stop: int, lanes: int) -> tuple[IntArray, IntArray]:
    """Return starts and lengths of lanes of equal length, for training; the remainder at the end is not read."""
    length = (stop - first) // lanes
    return first + np.arange(lanes, dtype=np.int64) * length, np.full(lanes, length, np.int64)


def even_lanes(first: int, stop: int, lanes: int) -> tuple[IntArray, IntArray]:
    """Return starts and lengths of lanes whose lengths differ by at most one, without remainder, for evaluation."""
    bounds = first + (stop - first) * np.arange(lanes + 1, dtype=np.int64) // lanes
    return bounds[:-1], np.diff(bounds)


class TextLanes:
    """An epoch in which lanes read one text, the same number of tokens at a time.

    Args:
        starts: (lanes,) first token that each lane predicts.
        lengths: (lanes,) number of tokens it predicts.
        total: number of targets in the text, including those that do not fill the lanes.
        segment_len: tokens per row.
        bounds: (rows + 1,) positions where each row begins and ends in the longest lane; None: rows of equal length.
        ext_len: maximum number of tokens before a row that are read again; only tokens of the same lane.

    Attributes:
        num_rows: number of rows.
        num_targets: number of tokens that are predicted.
        left_over: number of targets that do not fill the lanes.
    """

    def __init__(
        self,
        starts: IntArray,
        lengths: IntArray,
        *,
        total: int,
        segment_len: int,
        bounds: IntArray | None = None,
        ext_len: int = 0,
    ) -> None:
        self._starts, self._lengths = starts, lengths
        self._segment_len, self._bounds, self._ext_len = segment_len, bounds, ext_len
        self.num_targets = int(lengths.sum())
        self.left_over = total - self.num_targets
        self._longest = int(lengths.max(initial=0))
        self.num_rows = -(-self._longest // segment_len) if bounds is None else len(bounds) - 1

    def divided(self, parts: int) -> TextLanes:
        """Return the same text in `parts` times as many lanes and rows of equal length that are as many times shorter.

        A lane is divided into lanes whose lengths differ by at most one, so every target is read once, in the same
        number of rows: ceil(ceil(length / parts) / (segment_len / parts)) = ceil(length / segment_len).

        Args: parts: a divisor of segment_len.
        """
        cut = [
            even_lanes(start, start + length, parts)
            for start, length in zip(self._starts.tolist(), self._lengths.tolist(), strict=True)
        ]
        starts, lengths = (np.concatenate(arrays) for arrays in zip(*cut, strict=True))
        total = self.num_targets + self.left_over
        return TextLanes(starts, lengths, total=total, segment_len=self._segment_len // parts)

    def row(self, number: int) -> RowSpans:
        """Raises: IndexError: there is no such row."""
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of {self.num_rows}")
        if self._bounds is None:
            column = number * self._segment_len
            width = min(self._segment_len, self._longest - column)
        else:
            column, stop = self._bounds[number : number + 2].tolist()
            width = stop - column
        lengths = np.clip(self._lengths - column, 0, width)
        resets = np.full(len(lengths), number == 0)
        return RowSpans(self._starts + column, lengths, resets, min(self._ext_len, column))


class DocumentLanes:
    """An epoch in which lanes read whole documents, one after the other.

    Documents keep their order. Each belongs to the lane in whose share of all segments it begins. Therefore lanes can
    differ in length by the longest document, and the shorter ones are empty in the last rows.

    Args:
        starts: (documents,) first token of each that is predicted.
        lengths: (documents,) number of tokens of each that are predicted; a document without targets is left out.
        lanes: number of lanes.
        segment_len: tokens per row; fewer at the end of a document.

    Attributes: num_rows, num_targets, left_over: see `TextLanes`.
    """

    left_over = 0

    def __init__(self, starts: IntArray, lengths: IntArray, *, lanes: int, segment_len: int) -> None:
        known = lengths > 0
        self._starts, self._lengths = starts[known], lengths[known]
        self._segment_len = segment_len
        segments = -(-self._lengths // segment_len)
        self._ends = np.cumsum(segments)  # (documents,) of all segments, lane after lane
        before = self._ends - segments
        total = int(self._ends[-1]) if len(self._ends) else 0
        lane = before * lanes // max(1, total)
        bounds = np.searchsorted(lane, np.arange(lanes + 1))  # (lanes + 1,) documents
        self._lane_segments = np.concatenate([[0], self._ends])[bounds]  # (lanes + 1,) segments
        self.num_targets = int(self._lengths.sum())
        self.num_rows = int(np.diff(self._lane_segments).max(initial=0))

    def row(self, number: int) -> RowSpans:
        """Raises: IndexError: there is no such row."""
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of {self.num_rows}")
        segment = self._lane_segments[:-1] + number  # (lanes,)
        there = segment < self._lane_segments[1:]
        document = np.searchsorted(self._ends, np.where(there, segment, 0), side="right")
        first_segment = self._ends[document] - -(-self._lengths[document] // self._segment_len)
        column = np.where(there, segment - first_segment, 0) * self._segment_len
        lengths = np.where(there, np.minimum(self._lengths[document] - column, self._segment_len), 0)
        return RowSpans(self._starts[document] + column, lengths, there & (column == 0))


def varied_bounds(length: int, segment_len: int, seed: int, epoch: int) -> IntArray:
    """Return the positions where the rows of an epoch begin and end if their lengths are random.

    The distribution is that of the official code (`get_varlen_iter`): normal around segment_len, or, with probability
    0.05, around half of it; rounded down to a whole number of at least 5 and at most segment_len + 15. The length of
    row n depends only on the seed, the epoch and n. It is drawn with integer arithmetic, because the last digit of a
    logarithm differs between machines.

    Args:
        length: tokens of the longest lane.
        segment_len: approximate number of tokens per row.
        seed: the run's seed.
        epoch: number of the epoch.

    Returns: (rows + 1,) from 0 to length.
    """
    lowest, thresholds = _thresholds(segment_len)
    base = np.uint64(derive_seed(seed, "segment lengths", epoch))
    bounds = [np.zeros(1, np.int64)]
    drawn = 0
    while bounds[-1][-1] < length:
        numbers = np.arange(drawn, drawn + 1024, dtype=np.uint64) + base
        draws = mix(mix(numbers)) >> np.uint64(64 - DRAW_BITS)
        lengths = lowest + np.searchsorted(thresholds, draws, side="right")
        bounds.append(bounds[-1][-1] + np.cumsum(lengths))
        drawn += 1024
    ends = np.concatenate(bounds)
    return np.append(ends[ends < length], length)


def _thresholds(segment_len: int) -> tuple[int, NDArray[np.uint64]]:
    """Return the shortest length, and for each length except the longest the draw below which a row is not longer."""
    shortest, longest = min(SHORTEST, segment_len), segment_len + MOST_ABOVE
    shares = [
        (1 - HALF_SHARE) * _below(length + 1, segment_len) + HALF_SHARE * _below(length + 1, segment_len / 2)
        for length in range(shortest, longest)
    ]
    return shortest, np.array([round(share * 2**DRAW_BITS) for share in shares], np.uint64)


def _below(value: float, mean: float) -> float:
    """Return the fraction of a normal distribution that is below a value."""
    return 0.5 * (1 + math.erf((value - mean) / (STANDARD_DEVIATION * math.sqrt(2))))
