"""The order of samples: shuffling by arithmetic, and the plan of an epoch.

Shuffling: a Feistel network over the smallest even number of bits that can represent the size, repeated until the value
is below the size ("cycle walking", Black and Rogaway 2002), is a bijection of [0, size). Therefore position -> sample
has the same cost at position 10**12 as at 0, a resumed run needs no state except its position, and the order is the
same on every machine and rank.

Plan: row n contains the samples of optimiser step n of that epoch. It is a pure function of the lengths, max_tokens,
the seed and the epoch. A row contains the samples of all micro-batches and ranks, which take contiguous shares, so
their numbers do not change the samples of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import ConfigError, DataError
from manyheads.seeding import derive_seed

if TYPE_CHECKING:  # it needs torch, and is only read here
    from manyheads.data.batch import PackedShape

MAX_SIZE = 10**12
NUM_ROUNDS = 8
BLOCK = 2**15  # positions


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Permutation:
    """A pseudo-random order of `size` samples, different for each seed, epoch and name.

    Args:
        size: 0 to 10**12.
        seed: the run's seed.
        epoch: number of the epoch.
        name: distinguishes several orders of one run.

    Raises: ConfigError: the size is out of range.
    Cost: memory O(1); expected time O(1) per position (at most 4 walks on average).
    """

    def __init__(self, size: int, seed: int, epoch: int, name: str = "samples") -> None:
        if not 0 <= size <= MAX_SIZE:
            raise ConfigError(f"The size of the permutation is {size}; it must be from 0 to {MAX_SIZE}.")
        self.size = size
        self._half_bits = np.uint64(max(1, ((max(size, 2) - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        keys = [derive_seed(seed, "permutation", name, epoch, number) for number in range(NUM_ROUNDS)]
        self._keys = np.array(keys, np.uint64)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, positions: int | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the sample at each position, in an array of the same shape.

        Raises: IndexError: a position is not in [0, size).
        """
        flat = np.asarray(positions, np.int64).ravel()
        if flat.size and not (flat.min() >= 0 and flat.max() < self.size):
            raise IndexError(f"a position is outside [0, {self.size})")
        values = self._encrypt(flat.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64).reshape(np.shape(positions))

    def all(self) -> NDArray[np.integer[Any]]:
        """Return the whole order, computed in blocks that a cache holds. (size,) int32 or, above 2^31, int64."""
        order: NDArray[np.integer[Any]] = np.empty(self.size, np.int32 if self.size <= 2**31 else np.int64)
        for start in range(0, self.size, BLOCK):
            order[start : start + BLOCK] = self[np.arange(start, min(start + BLOCK, self.size))]
        return order

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix(right + key) & self._mask)
        return (left << self._half_bits) | right


IntArray = NDArray[np.integer[Any]]


class EpochBatches:
    """Batches of similar lengths in random order; every sample is in exactly one. Create a plan with `build`.

    `plan[n]` is a list of `accumulate` arrays of sample ids; `len(plan)` is the number of optimiser steps of the epoch.
    """

    def __init__(self, order: IntArray, starts: NDArray[np.int64], accumulate: int) -> None:
        self._order = order  # (samples,) ids, row after row
        self._starts = starts  # (rows + 1,)
        self.accumulate = accumulate

    @classmethod
    def build(
        cls,
        source_lengths: IntArray,
        target_lengths: IntArray,
        *,
        max_tokens: int,
        seed: int,
        epoch: int,
        accumulate: int = 1,
    ) -> EpochBatches:
        """Return the plan of an epoch.

        Samples are shuffled, sorted by length, divided into rows as large as max_tokens allows, and then the rows are
        shuffled. The length of a sample is the maximum of its target length and its source length plus the mean
        difference between targets and sources. Samples of equal length stay in random order, so that batches differ
        between epochs.

        Args:
            source_lengths: (samples,) tokens of each source, EOS included.
            target_lengths: (samples,) tokens of each target, BOS and EOS included.
            max_tokens: upper bound of max(rows x longest source, rows x longest target) over a row of the plan.
            seed: the run's seed.
            epoch: number of the epoch.
            accumulate: number of micro-batches in a row.

        Raises: DataError: a single sample is longer than max_tokens.
        """
        order = Permutation(len(source_lengths), seed, epoch).all()
        source, target = np.asarray(source_lengths)[order], np.asarray(target_lengths)[order]
        shift = round((int(target.sum(dtype=np.int64)) - int(source.sum(dtype=np.int64))) / max(1, len(order)))
        keys = np.maximum(source + shift, target)
        keys -= keys.min(initial=0)
        sorting = np.argsort(keys.astype(np.min_scalar_type(keys.max(initial=0))), kind="stable")  # radix below 2^16
        order, longest = order[sorting], np.maximum(source, target)[sorting]
        del source, target, keys, sorting
        if len(order) and longest.max() > max_tokens:
            raise DataError(
                f"Sample {order[longest.argmax()]} has {longest.max()} tokens, more than max_tokens"
                f" {max_tokens}; raise max_tokens, or lower max_source_len and max_target_len."
            )
        bounds = cut_rows(longest, max_tokens)
        rows = Permutation(len(bounds) - 1, seed, epoch, "rows").all()
        sizes = np.diff(bounds)[rows]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        shuffled = np.concatenate([order[:0], *(order[bounds[row] : bounds[row + 1]] for row in rows)])
        return cls(shuffled, starts, accumulate)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> list[NDArray[np.int64]]:
        """Return the sample ids of each micro-batch of a row: contiguous shares whose sizes differ by at most one.

        A share is empty only if the row has fewer samples than there are micro-batches.
        """
        return np.array_split(self.samples(row), self.accumulate)

    def samples(self, row: int) -> NDArray[np.int64]:
        """Return all sample ids of a row, shortest first.

        Raises: IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self._order[self._starts[row] : self._starts[row + 1]].astype(np.int64)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole plan; the same for the same order of training."""
        content = hashlib.sha256(f"{self.accumulate}:{len(self)}:".encode())
        for part in (self._starts, self._order):
            content.update(np.ascontiguousarray(part, "<i8").tobytes())
        return content.hexdigest()


class PackedBatches(EpochBatches):
    """Packed batches of samples in random order: each has as many as fit into its slots. Create a plan with `pack`.

    `plan[n]` is a list of at most `accumulate` arrays of sample ids, none of them empty; the last step of an epoch may
    have fewer, and its last batch fewer samples.
    """

    @classmethod
    def pack(
        cls,
        source_lengths: IntArray,
        target_lengths: IntArray,
        shape: PackedShape,
        *,
        seed: int,
        epoch: int,
        accumulate: int = 1,
    ) -> PackedBatches:
        """Return the plan of an epoch.

        Args:
            source_lengths: (samples,) tokens of each source, EOS included.
            target_lengths: (samples,) tokens of each target, BOS and EOS included; the last is not in a slot.
            shape: of all batches.
            seed, epoch, accumulate: see `EpochBatches.build`.

        Raises: DataError: a sample is longer than the shape's bound, or than its slots.
        """
        order = Permutation(len(source_lengths), seed, epoch).all()
        sides = [np.asarray(source_lengths)[order].astype(np.int64), np.asarray(target_lengths)[order] - np.int64(1)]
        rooms = [slots - shape.num_fillers for slots in (shape.source_slots, shape.target_slots)]
        for side, lengths, room in zip(("source", "target"), sides, rooms, strict=True):
            if len(order) and lengths.max() > min(shape.longest, room):
                raise DataError(
                    f"Sample {order[lengths.argmax()]} has {lengths.max()} {side} tokens, but at most"
                    f" {min(shape.longest, room)} fit into a packed batch; raise max_source_len or max_target_len, and"
                    " max_tokens with them."
                )
        ends = [np.concatenate([[0], np.cumsum(lengths)]) for lengths in sides]
        bounds = [0]
        while bounds[-1] < len(order):
            start = bounds[-1]
            fit = [
                int(np.searchsorted(end, end[start] + room, "right")) - 1 for end, room in zip(ends, rooms, strict=True)
            ]
            bounds.append(min(start + shape.most_pairs, *fit))
        return cls(order, np.array(bounds, np.int64), accumulate)

    def __len__(self) -> int:
        return -(-super().__len__() // self.accumulate)

    def __getitem__(self, row: int) -> list[NDArray[np.int64]]:
        """Return the sample ids of each micro-batch of a row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        bounds = self._starts[row * self.accumulate : (row + 1) * self.accumulate + 1]
        return [self._order[start:stop].astype(np.int64) for start, stop in pairwise(bounds)]

    def samples(self, row: int) -> NDArray[np.int64]:
        """Return all sample ids of a row. Raises: IndexError: there is no such row."""
        return np.concatenate(self[row])


def next_position(epoch: int, row: int, num_rows: int) -> tuple[int, int]:
    """Return the position after row `row` of an epoch of `num_rows` rows: the next row, or the next epoch's first."""
    return (epoch, row + 1) if row + 1 < num_rows else (epoch + 1, 0)


def cut_rows(longest: IntArray, max_tokens: int) -> NDArray[np.int64]:
    """Return the bounds of consecutive rows, each as large as rows x longest <= max_tokens allows, and never empty.

    Args:
        longest: (samples,) length of the longer side of each sample, in order.
        max_tokens: see `EpochBatches.build`.

    Returns: (rows + 1,) positions.
    """
    bounds = [0]
    start, total = 0, len(longest)
    while start < total:
        most = max(1, min(max_tokens // max(1, int(longest[start])), total - start))
        window = np.maximum.accumulate(longest[start : start + most]) * np.arange(1, most + 1)
        start += max(1, int(np.searchsorted(window, max_tokens, side="right")))
        bounds.append(start)
    return np.array(bounds, np.int64)


def by_length(lengths: IntArray, max_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of all samples, shortest first, a batch at a time; a sample above max_tokens is a batch of its own.

    Args: lengths: (samples,) length of each. max_tokens: upper bound of rows x longest sample.
    """
    order = np.argsort(lengths, kind="stable").astype(np.int64)
    for start, stop in pairwise(cut_rows(lengths[order], max_tokens)):
        yield order[start:stop]
