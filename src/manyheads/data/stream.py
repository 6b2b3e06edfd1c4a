"""The batches of training and validation by position, so that a resumed run asks for the next position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.data.batch import PairBatch
from manyheads.data.collate import collate, round_up
from manyheads.data.plan import BatchPlan, cut_rows
from manyheads.data.settings import DataSettings
from manyheads.data.store import PairStore
from manyheads.errors import DataError

__all__ = ["LengthReport", "TrainingStream", "eval_batches"]


@dataclass(frozen=True)
class LengthReport:
    """Which training pairs are used, and why others are not. Lengths are in tokens, special ones included.

    Attributes:
        policy: `drop`, `truncate` or `fail`.
        available: pairs that there are.
        total: pairs that were looked at: all, or as many as `data.num_train_pairs` says.
        too_long: of those, how many were over a limit.
        kept: pairs that are trained on.
        longest_source: before the policy.
        longest_target: before the policy.
        max_source_len: the limit.
        max_target_len: the limit.
    """

    policy: str
    available: int
    total: int
    too_long: int
    kept: int
    longest_source: int
    longest_target: int
    max_source_len: int
    max_target_len: int

    def describe(self) -> str:
        """One line for people: the counts, and what setting cut the data and how to keep all of it."""
        done = {"drop": "dropped", "truncate": "truncated", "fail": "found"}[self.policy]
        line = (
            f"{self.kept} of {self.total} training pairs kept, {self.too_long} too long and {done}"
            f" (longest source {self.longest_source}, target {self.longest_target} tokens)"
        )
        if self.too_long:
            over = [
                f"data.max_{side}_len is {limit}, {longest} would {'drop' if self.policy == 'drop' else 'cut'} none"
                for side, limit, longest in (
                    ("source", self.max_source_len, self.longest_source),
                    ("target", self.max_target_len, self.longest_target),
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


class TrainingStream:
    """The training batches of a run, by epoch and row.

    Args:
        store: the training pairs.
        settings: budget, limits and policy; `num_train_pairs` > 0 takes only the first so many.
        seed: of the order.
        pad_id: the tokenizer's, as the next two.
        bos_id: see pad_id.
        eos_id: see pad_id.
        available: pairs of the corpus, if the store holds a part of them; for the report alone.

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
    ) -> None:
        self.store = store
        self.settings = settings
        self.seed = seed
        self._special = {"pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
        count = min(len(store), settings.num_train_pairs or len(store))
        source, target = store.source_lengths[:count] + 1, store.target_lengths[:count] + 2
        over = (source > settings.max_source_len) | (target > settings.max_target_len)
        self.report = LengthReport(
            policy=settings.too_long,
            available=max(available, len(store)),
            total=count,
            too_long=int(over.sum()),
            kept=count if settings.too_long != "drop" else int(count - over.sum()),
            longest_source=int(source.max(initial=0)),
            longest_target=int(target.max(initial=0)),
            max_source_len=settings.max_source_len,
            max_target_len=settings.max_target_len,
        )
        self._refuse(over, source, target)
        self._kept = np.flatnonzero(~over) if settings.too_long == "drop" else np.arange(count)
        # What the plan counts is what collate will make of them.
        self._source_lengths = self._padded(source, settings.max_source_len)
        self._target_lengths = self._padded(target, settings.max_target_len)
        self._plans: dict[int, BatchPlan] = {}

    def _padded(self, lengths: NDArray[np.int32], limit: int) -> NDArray[np.integer[Any]]:
        return round_up(np.minimum(lengths[self._kept], limit), self.settings.pad_to_multiple, limit)

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
            why = f"all {self.report.total} are too long ({limits})" if self.report.total else "there are none"
            raise DataError(f"No training pairs are left: {why}.")

    def describe(self) -> str:
        """One line for people."""
        return self.report.describe()

    def plan(self, epoch: int) -> BatchPlan:
        """The plan of an epoch, over the kept pairs; the last two are remembered."""
        if epoch not in self._plans:
            while len(self._plans) > 1:
                del self._plans[next(iter(self._plans))]
            self._plans[epoch] = BatchPlan.build(
                self._source_lengths,
                self._target_lengths,
                max_tokens=self.settings.max_tokens,
                seed=self.seed,
                epoch=epoch,
                accumulate=self.settings.accumulate,
            )
        return self._plans[epoch]

    def rows(self, epoch: int) -> int:
        """Optimiser steps of an epoch; epochs may differ by a few."""
        return len(self.plan(epoch))

    def sample_ids(self, epoch: int, row: int) -> list[NDArray[np.int64]]:
        """Positions in the store of the samples of each micro-batch."""
        return [self._kept[share] for share in self.plan(epoch)[row]]

    def at(self, epoch: int, row: int) -> list[PairBatch]:
        """The micro-batches of one optimiser step: at most `accumulate`, none of them empty.

        Raises: IndexError: the epoch has no such row.
        """
        names = ("max_source_len", "max_target_len", "pad_to_multiple")
        limits = {name: getattr(self.settings, name) for name in names}
        shares = self.sample_ids(epoch, row)
        return [collate(self.store, share, **self._special, **limits) for share in shares if len(share)]

    def next_position(self, epoch: int, row: int) -> tuple[int, int]:
        """Where to go on after a step: the next row, or the first of the next epoch."""
        return (epoch, row + 1) if row + 1 < self.rows(epoch) else (epoch + 1, 0)


def eval_batches(store: PairStore, max_tokens: int, *, pad_id: int, bos_id: int, eos_id: int) -> Iterator[PairBatch]:
    """Every pair once, shortest first, nothing dropped or cut; `sample_ids` restore the order.

    Args:
        store: pairs to evaluate on.
        max_tokens: bound of max(rows x longest source, rows x longest target); a pair beyond it comes alone.
        pad_id: the tokenizer's, as the next two.
        bos_id: see pad_id.
        eos_id: see pad_id.
    """
    source, target = store.source_lengths + 1, store.target_lengths + 2
    order = np.lexsort((source, target))
    bounds = cut_rows(np.maximum(source, target)[order], max_tokens)
    for start, stop in pairwise(bounds):
        yield collate(store, order[start:stop], pad_id=pad_id, bos_id=bos_id, eos_id=eos_id)
