"""One training order over several data sets. The order is a pure function of seed, epoch and row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.batch import SegmentBatch
from manyheads.data.sampler import Permutation
from manyheads.data.store import PairStore, TokenSide, mixed_digest
from manyheads.errors import DataError

if TYPE_CHECKING:
    from manyheads.data.language.segments import SegmentStream


def join_pairs(stores: Sequence[PairStore]) -> PairStore:
    """Return the pairs of all stores, one store after the other, as one store in memory.

    Cost: a copy of all ids.
    """
    digest = mixed_digest([store.digest for store in stores])
    source, target = (_join_sides([getattr(store, side) for store in stores]) for side in ("source", "target"))
    return PairStore(source, target, max(store.vocab_size for store in stores), digest)


def _join_sides(sides: Sequence[TokenSide]) -> TokenSide:
    begins = np.cumsum([0, *(len(side.ids) for side in sides[:-1])])
    offsets = [side.offsets[:-1] + begin for side, begin in zip(sides, begins, strict=True)]
    end = np.array([sum(len(side.ids) for side in sides)], np.int64)
    return TokenSide(np.concatenate([side.ids for side in sides]), np.concatenate([*offsets, end]))


@dataclass(frozen=True)
class Draws:
    """The samples of each epoch of a mix: every data set is read again and again, in another order each time.

    Position p of data set k is sample `p % size` of its order number `p // size`, so the samples of an epoch are found
    without those of the epochs before it. The main data set is drawn as often as it has samples; the others in
    proportion to the shares.

    Attributes:
        parts: samples of each data set, as positions in the joined store.
        shares: of each data set; they add up to 1.
        main: number of the data set whose size determines the length of an epoch.
        seed: the run's seed.
    """

    parts: tuple[NDArray[np.int64], ...]
    shares: tuple[float, ...]
    main: int
    seed: int

    @property
    def counts(self) -> list[int]:
        """The number of samples that an epoch has from each data set, at least one."""
        total = len(self.parts[self.main]) / self.shares[self.main]
        return [max(1, round(share * total)) for share in self.shares]

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples of an epoch, one data set after the other. (samples,)"""
        found = []
        for number, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            positions = np.arange(epoch * count, (epoch + 1) * count, dtype=np.int64)
            passes = positions // len(part)
            for one in range(int(passes[0]), int(passes[-1]) + 1):
                order = Permutation(len(part), self.seed, one, f"mix {number}")
                found.append(part[order[positions[passes == one] % len(part)]])
        return np.concatenate(found)


def lanes_of(shares: Sequence[float], lanes: int) -> list[int]:
    """Divide lanes in proportion to the shares, at least one each; what rounding leaves goes to the largest remainders.

    Args: shares: they add up to 1. lanes: at least as many as shares.
    """
    free = lanes - len(shares)
    wanted = [max(0.0, share * lanes - 1) for share in shares]
    scale = free / max(sum(wanted), 1e-12)
    exact = [want * scale for want in wanted]
    found = [int(value) for value in exact]
    remainders = sorted(range(len(shares)), key=lambda one: found[one] - exact[one])
    for number in remainders[: free - sum(found)]:
        found[number] += 1
    return [1 + count for count in found]


class MixedSegments:
    """The training segments of several texts: each has lanes of its own, which read it again and again.

    An epoch is one pass over the main text. The others are at the position that the number of rows so far gives, so
    every row is found directly.

    Args:
        streams: of each text, whose epochs all have the same number of rows.
        names: of the texts, for people.
        main: number of the text that determines the length of an epoch.
        accumulate: number of micro-batches.
    """

    def __init__(self, streams: Sequence[SegmentStream], names: Sequence[str], main: int, accumulate: int) -> None:
        self._streams, self._names, self._main, self._accumulate = list(streams), list(names), main, accumulate
        lengths = [len(stream.store) for stream in streams]
        self._begins = np.cumsum([0, *lengths[:-1]])

    def rows(self, epoch: int) -> int:
        """Return the number of optimiser steps of an epoch."""
        return self._streams[self._main].rows(epoch)

    def at(self, epoch: int, row: int, progress: float = 1.0) -> list[SegmentBatch]:
        """Return the micro-batches of one optimiser step; their `sample_ids` count through all texts.

        Args: progress: see `SegmentStream.whole`.

        Raises: IndexError: the epoch has no such row.
        """
        if not 0 <= row < self.rows(epoch):
            raise IndexError(f"row {row} of {self.rows(epoch)}")
        step = epoch * self.rows(epoch) + row
        parts = []
        for number, stream in enumerate(self._streams):
            part = stream.whole(*divmod(step, stream.rows(0)), progress)
            if number != self._main and row == 0:
                # The loop clears all memory at the beginning of an epoch.
                part = SegmentBatch(**{**vars(part), "resets": torch.ones_like(part.resets)})
            parts.append(part)
        stacked = _stack(parts, self._begins.tolist())
        return replace(stacked, memory_len=parts[self._main].memory_len).split(self._accumulate)

    def describe(self) -> str:
        """Return one line for each text."""
        return "\n".join(
            f"{name}: {stream.describe()}" for name, stream in zip(self._names, self._streams, strict=True)
        )


def _stack(parts: Sequence[SegmentBatch], begins: Sequence[int]) -> SegmentBatch:
    """Return all lanes in one batch, padded to the longest."""
    if any(part.num_context for part in parts):
        raise DataError("A mix of texts cannot read context again; set model.ext_len to 0.")
    width = max(part.tokens.shape[1] for part in parts)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))

    places = [part.first_positions for part in parts if part.first_positions is not None]
    return SegmentBatch(
        tokens=torch.cat([padded(part.tokens) for part in parts]),
        targets=torch.cat([padded(part.targets) for part in parts]),
        lengths=torch.cat([part.lengths for part in parts]),
        resets=torch.cat([part.resets for part in parts]),
        sample_ids=torch.cat([part.sample_ids + begin for part, begin in zip(parts, begins, strict=True)]),
        first_positions=torch.cat(places) if places else None,
    )
