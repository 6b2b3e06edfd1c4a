"""The batches of training and validation by position, so that a run can resume at any position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.batch import PackedBatch, PackedShape, PairBatch
from manyheads.data.collate import collate, round_up
from manyheads.data.sampler import EpochBatches, PackedBatches, cut_rows
from manyheads.errors import DataError

if TYPE_CHECKING:
    from manyheads.data.mixing import Draws
    from manyheads.data.settings import DataSettings
    from manyheads.data.store import IntArray, PairStore


@dataclass(frozen=True)
class LengthReport:
    """The training pairs that are used, and why others are not. Lengths are in tokens, including special ones.

    Attributes:
        settings: limits and policy.
        available: number of pairs in the data.
        total: number of pairs considered: all, or `data.num_train_pairs`.
        too_long: number of these pairs over a limit.
        kept: number of pairs used for training.
        longest_source: before the policy is applied.
        longest_target: before the policy is applied.
    """

    settings: DataSettings
    available: int
    total: int
    too_long: int
    kept: int
    longest_source: int
    longest_target: int

    def describe(self) -> str:
        """Return one line for users: the counts, the setting that removed data, and how to keep all of it."""
        done = {"drop": "dropped", "truncate": "truncated", "fail": "found"}[self.settings.too_long]
        line = (
            f"{self.kept} of {self.total} training pairs kept, {self.too_long} too long and {done}"
            f" (longest source {self.longest_source}, target {self.longest_target} tokens)"
        )
        if self.too_long:
            over = [
                f"data.max_{side}_len is {limit}, {longest} would {'drop' if done == 'dropped' else 'cut'} none"
                for side, limit, longest in (
                    ("source", self.settings.max_source_len, self.longest_source),
                    ("target", self.settings.max_target_len, self.longest_target),
                )
                if longest > limit
            ]
            line += f": {'; '.join(over)}"
        if self.total < self.available:
            line += (
                f". Only the first {self.total} of {self.available} pairs are used, because data.num_train_pairs is"
                f" {self.total}; 0 uses all"
            )
        return line


class Segmenting(Protocol):
    """Segments the training pairs of each epoch anew, such as BPE dropout."""

    def pairs(self, store: PairStore, samples: IntArray, epoch: int, limits: tuple[int, int]) -> PairStore:
        """Return the given pairs of a store with the segmentations of an epoch.

        Args: samples: (pairs,) positions in the store. limits: most tokens of a source and of a target, without special
            ids; a longer sentence keeps its ids.
        """


_MORE_SLOTS, _MORE_PAIRS = 0.02, 0.125
"""Room of packed batches beyond the usual numbers of tokens of the smaller side, and of pairs."""


class TrainingStream:
    """The training batches of a run, by epoch and row.

    Args:
        store: the training pairs.
        settings: budget, limits and policy; `num_train_pairs` > 0 uses only the first pairs.
        seed: determines the order.
        pad_id: the tokenizer's id of padding.
        bos_id: the tokenizer's first id of a target.
        eos_id: the tokenizer's last id of a sentence.
        available: number of pairs in the corpus, if the store contains fewer; only for the report.
        mix: number of pairs and share of each data set in the store, one after the other, by name; empty: all pairs
            are one data set, and an epoch contains each of them once.
        dropout: segments the pairs of each epoch anew; the lengths of an epoch's plan are those of its segmentations.
            Which pairs are too long depends on the usual segmentation. None: the ids of the store.

    Raises: DataError: no pair is left, or a pair is too long and the policy is `fail`.
    """

    def __init__(
        self,
        store: PairStore,
        settings: DataSettings,
        seed: int,
        *,
        pad_id: int,
        bos_id: int,
        eos_id: int,
        available: int = 0,
        mix: Sequence[tuple[str, int, float]] = (),
        dropout: Segmenting | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.seed = seed
        self._special = {"pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
        count = min(len(store), settings.num_train_pairs or len(store))
        source, target = store.source_lengths[:count] + 1, store.target_lengths[:count] + 2
        over = (source > settings.max_source_len) | (target > settings.max_target_len)
        self.report = LengthReport(
            settings=settings,
            available=max(available, len(store)),
            total=count,
            too_long=int(over.sum()),
            kept=count if settings.too_long != "drop" else int(count - over.sum()),
            longest_source=int(source.max(initial=0)),
            longest_target=int(target.max(initial=0)),
        )
        self._refuse(over, source, target)
        self._kept = np.flatnonzero(~over) if settings.too_long == "drop" else np.arange(count)
        self._mix = list(mix)
        self._draws = self._make_draws() if mix else None
        self._padded = self._pad(source, target)
        self.shape = self._packed_shape() if settings.batching == "packed" else None
        self._dropout = dropout
        self._segmented = lru_cache(maxsize=1)(self._segment)  # one epoch, because its ids are in memory
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def _pad(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> list[IntArray]:
        """Return the lengths that `collate` gives to sentences, given their lengths with special ids."""
        options = self.settings
        return [
            round_up(np.minimum(lengths, limit), options.pad_to_multiple, limit)
            for lengths, limit in ((source, options.max_source_len), (target, options.max_target_len))
        ]

    def _packed_shape(self) -> PackedShape:
        """Return the shape of packed batches: `max_tokens` slots for the side with more tokens, fewer for the other."""
        micro, longest = self.settings.max_tokens // self.settings.accumulate, self.settings.longest
        samples = self._samples(0)
        totals = [int(lengths[samples].sum(dtype=np.int64)) for lengths in self._padded]
        totals[1] -= len(samples)
        fillers = -(-micro // longest)

        def slots(total: int) -> int:
            # Batches differ in the ratio of their sides.
            usual = round_up(int(micro * total / max(totals) * (1 + _MORE_SLOTS)) + 1, 8, micro)
            return max(usual, longest + fillers)

        usual_pairs = micro * len(samples) / max(totals)
        return PackedShape(slots(totals[0]), slots(totals[1]), int(usual_pairs * (1 + _MORE_PAIRS)) + 8, longest)

    def _samples(self, epoch: int) -> NDArray[np.int64]:
        """Return the positions in the store of the pairs of an epoch."""
        return self._kept if self._draws is None else self._draws.epoch(epoch)

    def _segment(self, epoch: int) -> PairStore:
        """Return the pairs of an epoch, segmented for it, in the order of `_samples`."""
        assert self._dropout is not None
        limits = self.settings.max_source_len - 1, self.settings.max_target_len - 2
        return self._dropout.pairs(self.store, self._samples(epoch), epoch, limits)

    def _make_draws(self) -> Draws:
        """Raises: DataError: all pairs of a data set are too long."""
        from manyheads.data.mixing import Draws

        bounds = np.cumsum([0, *(size for _, size, _ in self._mix)])
        parts = tuple(self._kept[(self._kept >= first) & (self._kept < last)] for first, last in pairwise(bounds))
        for (name, size, _), part in zip(self._mix, parts, strict=True):
            if not len(part):
                raise DataError(f"No training pairs of {name} are left: all {size} are too long; raise the limits.")
        names = [name for name, _, _ in self._mix]
        shares = tuple(share for _, _, share in self._mix)
        return Draws(parts, shares, names.index(self.settings.path), self.seed)

    def _make_plan(self, epoch: int) -> tuple[EpochBatches, NDArray[np.int64]]:
        """Return the plan of an epoch, and the samples that it numbers."""
        samples = self._samples(epoch)
        if self._dropout is None:
            source, target = (lengths[samples] for lengths in self._padded)
        else:
            store = self._segmented(epoch)
            source, target = self._pad(store.source_lengths + 1, store.target_lengths + 2)
        if self.shape is not None:
            accumulate = self.settings.accumulate
            lengths = source, target, self.shape
            return PackedBatches.pack(*lengths, seed=self.seed, epoch=epoch, accumulate=accumulate), samples
        budget = {"max_tokens": self.settings.max_tokens, "accumulate": self.settings.accumulate}
        return EpochBatches.build(source, target, seed=self.seed, epoch=epoch, **budget), samples

    def _refuse(self, over: NDArray[np.bool_], source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        limits = f"max_source_len {self.settings.max_source_len}, max_target_len {self.settings.max_target_len}"
        if self.settings.too_long == "fail" and over.any():
            first = int(over.argmax())
            raise DataError(
                f"{self.report.too_long} training pairs are too long ({limits}); the first is pair {first} with"
                f" {source[first]} source and {target[first]} target tokens."
                " Raise the limits, or set data.too_long to drop or truncate."
            )
        if not self.report.kept:
            if not self.report.total:
                raise DataError("The training data has no sentence pairs; prepare it from files that have some.")
            raise DataError(f"No training pairs are left: all {self.report.total} are too long ({limits}).")

    def describe(self) -> str:
        """Return one line for users; of a mix, also what an epoch contains of each data set."""
        lines = [self.report.describe()]
        if self.shape is not None:
            lines.append(f"batches are packed: {self.shape.describe()}")
        if self._draws is not None:
            lines += [
                f"an epoch has {count:,} pairs of {name} (of {len(part):,}), {share:.0%}"
                for (name, _, share), count, part in zip(self._mix, self._draws.counts, self._draws.parts, strict=True)
            ]
        return "\n".join(lines)

    def plan(self, epoch: int) -> EpochBatches:
        """Return the plan of an epoch, over the kept pairs, or the pairs drawn of a mix; the last two are cached."""
        return self._plan(epoch)[0]

    def rows(self, epoch: int) -> int:
        """Return the number of optimiser steps of an epoch; epochs can differ by a few."""
        return len(self.plan(epoch))

    def sample_ids(self, epoch: int, row: int) -> list[NDArray[np.int64]]:
        """Return the positions in the store of the samples of each micro-batch."""
        plan, samples = self._plan(epoch)
        return [samples[share] for share in plan[row]]

    def at(self, epoch: int, row: int, progress: float = 1.0) -> list[PairBatch] | list[PackedBatch]:
        """Return the micro-batches of one optimiser step; they are packed if `data.batching` says so.

        They are at most `accumulate`, none of them empty.

        Args: progress: has no effect.

        Raises: IndexError: the epoch has no such row.
        """
        pairs = self._pairs_at(epoch, row)
        return pairs if self.shape is None else [PackedBatch.of(batch, self.shape) for batch in pairs]

    def _pairs_at(self, epoch: int, row: int) -> list[PairBatch]:
        names = ("max_source_len", "max_target_len", "pad_to_multiple")
        limits = {name: getattr(self.settings, name) for name in names}
        if self._dropout is None:
            shares = self.sample_ids(epoch, row)
            return [collate(self.store, share, **self._special, **limits) for share in shares if len(share)]
        plan, samples = self._plan(epoch)
        store = self._segmented(epoch)
        batches = [collate(store, share, **self._special, **limits) for share in plan[row] if len(share)]
        return [replace(batch, sample_ids=torch.from_numpy(samples)[batch.sample_ids]) for batch in batches]


def eval_batches(store: PairStore, max_tokens: int, *, pad_id: int, bos_id: int, eos_id: int) -> Iterator[PairBatch]:
    """Yield every pair once, shortest first, without dropping or truncating any; `sample_ids` give the original order.

    Args:
        store: the pairs to evaluate on.
        max_tokens: upper bound of max(rows x longest source, rows x longest target); a longer pair is a batch of its
            own.
        pad_id: the tokenizer's id of padding.
        bos_id: the tokenizer's first id of a target.
        eos_id: the tokenizer's last id of a sentence.
    """
    source, target = store.source_lengths + 1, store.target_lengths + 2
    order = np.lexsort((source, target))
    bounds = cut_rows(np.maximum(source, target)[order], max_tokens)
    for start, stop in pairwise(bounds):
        yield collate(store, order[start:stop], pad_id=pad_id, bos_id=bos_id, eos_id=eos_id)
