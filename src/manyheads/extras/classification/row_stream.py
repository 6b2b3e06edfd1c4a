"""The batches of rows that have one length each, such as texts with a label or sentences with a tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from manyheads.data.batch import round_up
from manyheads.data.sampler import EpochBatches
from manyheads.errors import DataError

if TYPE_CHECKING:
    from manyheads.data.settings import RowSettings

B = TypeVar("B")


class RowStream(ABC, Generic[B]):
    """The training batches of a run, by epoch and row: a pure function of the rows, the settings and the seed.

    Args:
        lengths: of all rows, in the unit of the settings.
        settings: budget, longest row and policy.
        seed: determines the order.

    Raises: DataError: no row is left, or a row is too long and the policy is `fail`.
    """

    def __init__(self, lengths: NDArray[np.int32], settings: RowSettings, seed: int) -> None:
        self.settings, self.seed = settings, seed
        name, unit = settings.row, settings.unit
        over = lengths > settings.max_len
        self.num_rows, self.num_too_long, self.longest = len(lengths), int(over.sum()), int(lengths.max(initial=0))
        if self.num_too_long and settings.too_long == "fail":
            first = int(over.argmax())
            raise DataError(
                f"{self.num_too_long} training {name}s are too long; the first is {name} {first + 1} with"
                f" {lengths[first]} {unit}, and data.max_len is {settings.max_len}. Raise it, or set data.too_long to"
                f" {settings.remedy}."
            )
        self._kept = np.arange(len(lengths)) if settings.too_long == "truncate" else np.flatnonzero(~over)
        if not len(self._kept):
            longer = f"all {self.num_rows} are longer than data.max_len {settings.max_len}"
            raise DataError(f"No training {name}s are left: {longer if self.num_rows else 'the set is empty'}.")
        limited = np.minimum(lengths[self._kept], settings.max_len)
        self._lengths = round_up(limited, settings.pad_to_multiple, settings.max_len)
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def _make_plan(self, epoch: int) -> EpochBatches:
        budget = {"max_tokens": self.settings.max_tokens, "accumulate": self.settings.accumulate}
        return EpochBatches.build(self._lengths, self._lengths, seed=self.seed, epoch=epoch, **budget)

    @abstractmethod
    def describe(self) -> str:
        """Return one line for users: what is used, and the setting that cuts or removes rows."""

    @abstractmethod
    def collate(self, sample_ids: NDArray[np.int64], **limits: Any) -> B:
        """Return a batch of some rows. limits: `max_len` and `pad_to_multiple`."""

    def rows(self, epoch: int) -> int:
        """Return the number of optimiser steps of an epoch; epochs can differ by a few."""
        return len(self._plan(epoch))

    def at(self, epoch: int, row: int, progress: float = 1.0) -> list[B]:
        """Return the micro-batches of one optimiser step, none of them empty. progress: has no effect."""
        limits = {"max_len": self.settings.max_len, "pad_to_multiple": self.settings.pad_to_multiple}
        shares = [self._kept[share] for share in self._plan(epoch)[row]]
        return [self.collate(share, **limits) for share in shares if len(share)]
