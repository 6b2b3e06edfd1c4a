"""The batches of training and validation by position, so that a run can resume at any position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

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
        padded_source, padded_target = (  # the lengths that `collate` gives them
            round_up(np.minimum(lengths[self._kept], limit), settings.pad_to_multiple, limit)
            for lengths, limit in ((source, settings.max_source_len), (target, settings.max_target_len))
        )
        budget = {"max_tokens": settings.max_tokens, "accumulate": settings.accumulate}
        build = partial(BatchPlan.build, padded_source, padded_target, seed=seed, **budget)
        self._plan = lru_cache(maxsize=2)(build)

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
        """Return one line for users."""
        return self.report.describe()

    def plan(self, epoch: int) -> BatchPlan:
        """Return the plan of an epoch, over the kept pairs; the last two are cached."""
        return self._plan(epoch=epoch)

    def rows(self, epoch: int) -> int:
        """Return the number of optimiser steps of an epoch; epochs can differ by a few."""
        return len(self.plan(epoch))

    def sample_ids(self, epoch: int, row: int) -> list[NDArray[np.int64]]:
        """Return the positions in the store of the samples of each micro-batch."""
        return [self._kept[share] for share in self.plan(epoch)[row]]

    def at(self, epoch: int, row: int) -> list[PairBatch]:
        """Return the micro-batches of one optimiser step: at most `accumulate`, none of them empty.

        Raises: IndexError: the epoch has no such row.
        """
        names = ("max_source_len", "max_target_len", "pad_to_multiple")
        limits = {name: getattr(self.settings, name) for name in names}
        shares = self.sample_ids(epoch, row)
        return [collate(self.store, share, **self._special, **limits) for share in shares if len(share)]

    def next_position(self, epoch: int, row: int) -> tuple[int, int]:
        """Return the position after a step: the next row, or the first row of the next epoch."""
        return (epoch, row + 1) if row + 1 < self.rows(epoch) else (epoch + 1, 0)


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
