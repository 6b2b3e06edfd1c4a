"""Shuffling by arithmetic: the position of a sample in an epoch is computed, never stored.

A Feistel network over the smallest even number of bits that can represent the size, repeated until the value is below
the size ("cycle walking", Black and Rogaway 2002), is a bijection of [0, size). Therefore position -> sample has the
same cost at position 10**12 as at 0, a resumed run needs no state except its position, and the order is the same on
every machine and rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed

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
