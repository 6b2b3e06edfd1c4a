"""Stretches of pairs that are shifted against each other, found by the lengths of their sentences.

Long sentences have long translations. If line n of one file belongs to line n + k of the other, the lengths agree at
that shift, and not without it (Gale and Church 1993, Computational Linguistics 19(1), use the same fact to align
sentences).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

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
