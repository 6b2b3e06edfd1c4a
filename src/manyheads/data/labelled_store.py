"""Labelled texts as ids on disk, and the batches of training and evaluation by position.

The format is that of `store`, with two sides: `text`, and `label`, whose sentences have one id each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.batch import LabelledBatch
from manyheads.data.collate import padded_rows, round_up
from manyheads.data.labelled_settings import LabelledSettings
from manyheads.data.plan import BatchPlan, cut_rows
from manyheads.data.store import SideWriter, StoreFormat, TokenSide, sides_from_lists
from manyheads.errors import DataError

__all__ = ["LabelledStore", "LabelledStream", "collate_labelled", "eval_labelled", "write_labelled"]

_FORMAT = StoreFormat("manyheads.labelled", "num_texts", ("text", "label"), ("uint16", "uint32"))


@dataclass(frozen=True)
class LabelledStore:
    """Texts as ids without EOS, and the id of each text's label.

    Attributes:
        text: text i is `text[i]`.
        label: (texts,) ids of labels.
        vocab_size: every id of either kind is below it.
        digest: SHA-256 over ids and labels.
    """

    text: TokenSide
    label: NDArray[np.int64]
    vocab_size: int
    digest: str

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> LabelledStore:
        """Map a folder written by `write_labelled`. Raises: DataError: it is missing, damaged, or of a newer format."""
        sides, vocab_size, digest = _FORMAT.open(Path(folder), verify)
        return cls._of(sides, vocab_size, digest, str(folder))

    @classmethod
    def from_lists(cls, rows: Iterable[tuple[Sequence[int], int]], vocab_size: int) -> LabelledStore:
        """Return a store in memory, of (ids, label). Raises: DataError: an id is outside the vocabulary."""
        known = list(rows)
        sides, digest = sides_from_lists([[ids for ids, _ in known], [[label] for _, label in known]], vocab_size)
        return cls._of(sides, vocab_size, digest, "The given data")

    @classmethod
    def _of(cls, sides: Sequence[TokenSide], vocab_size: int, digest: str, where: str) -> LabelledStore:
        text, label = sides
        if (label.lengths != 1).any():
            raise DataError(f"{where} has texts without a label, or with several. Prepare the data again.")
        return cls(text, np.asarray(label.ids, np.int64), vocab_size, digest)

    def __len__(self) -> int:
        return len(self.text)


def write_labelled(folder: str | Path, rows: Iterable[tuple[Sequence[int], int]], vocab_size: int) -> int:
    """Write a store of (ids, label); it appears under its name only when it is complete.

    Returns: the number of texts. Raises: DataError, SaveError: see `store.write_pairs`.
    """

    def fill(text: SideWriter, label: SideWriter) -> None:
        for ids, one in rows:
            text.add(ids)
            label.add((one,))

    return _FORMAT.write(Path(folder), vocab_size, fill)[0].num_sentences


def collate_labelled(
    store: LabelledStore,
    sample_ids: NDArray[np.int64],
    *,
    pad_id: int,
    eos_id: int,
    max_len: int | None = None,
    pad_to_multiple: int = 1,
) -> LabelledBatch:
    """Return a batch of some texts, in the given order.

    Args:
        store: all texts.
        sample_ids: (batch,) positions in the store, at least one.
        pad_id: the id of padding, on the right.
        eos_id: the last id of each text.
        max_len: longer texts are truncated to this length, which includes EOS.
        pad_to_multiple: rows are padded to a multiple of this length, but not beyond max_len.
    """
    rows, lengths = padded_rows(store.text, sample_ids, [], eos_id, pad_id, max_len, pad_to_multiple)
    return LabelledBatch(
        tokens=torch.from_numpy(rows),
        lengths=torch.from_numpy(lengths),
        labels=torch.from_numpy(store.label[sample_ids]),
        sample_ids=torch.from_numpy(sample_ids.copy()),
    )


def eval_labelled(store: LabelledStore, max_tokens: int, *, pad_id: int, eos_id: int) -> Iterator[LabelledBatch]:
    """Yield every text once, shortest first, none truncated; `sample_ids` give the original order.

    Args: max_tokens: upper bound of rows x longest text; a longer text is a batch of its own.
    """
    lengths = store.text.lengths + 1
    order = np.argsort(lengths, kind="stable").astype(np.int64)
    for start, stop in pairwise(cut_rows(lengths[order], max_tokens)):
        yield collate_labelled(store, order[start:stop], pad_id=pad_id, eos_id=eos_id)


class LabelledStream:
    """The training batches of a run, by epoch and row: a pure function of the store, the settings and the seed.

    Args:
        store: the training texts.
        settings: budget, longest text and policy.
        seed: determines the order.
        pad_id, eos_id: the tokenizer's.

    Raises: DataError: no text is left, or a text is too long and the policy is `fail`.
    """

    def __init__(
        self, store: LabelledStore, settings: LabelledSettings, seed: int, *, pad_id: int, eos_id: int
    ) -> None:
        self.store, self.settings, self.seed = store, settings, seed
        self._special = {"pad_id": pad_id, "eos_id": eos_id}
        lengths = store.text.lengths + 1
        over = lengths > settings.max_len
        self.num_too_long, self.longest = int(over.sum()), int(lengths.max(initial=0))
        if self.num_too_long and settings.too_long == "fail":
            first = int(over.argmax())
            raise DataError(
                f"{self.num_too_long} training texts are too long; the first is text {first + 1} with {lengths[first]}"
                f" tokens, and data.max_len is {settings.max_len}. Raise it, or set data.too_long to truncate or drop."
            )
        self._kept = np.flatnonzero(~over) if settings.too_long == "drop" else np.arange(len(store))
        if not len(self._kept):
            why = (
                f"all {len(store)} are longer than data.max_len {settings.max_len}"
                if len(store)
                else "the set is empty"
            )
            raise DataError(f"No training texts are left: {why}.")
        limited = np.minimum(lengths[self._kept], settings.max_len)
        self._lengths = round_up(limited, settings.pad_to_multiple, settings.max_len)
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def _make_plan(self, epoch: int) -> BatchPlan:
        budget = {"max_tokens": self.settings.max_tokens, "accumulate": self.settings.accumulate}
        return BatchPlan.build(self._lengths, self._lengths, seed=self.seed, epoch=epoch, **budget)

    def describe(self) -> str:
        """Return one line for users: what is used, and the setting that cuts or removes text."""
        done = {"truncate": "truncated", "drop": "dropped", "fail": "found"}[self.settings.too_long]
        line = (
            f"{len(self._kept):,} of {len(self.store):,} training texts kept, {self.num_too_long:,} too long and {done}"
        )
        line += f" (the longest has {self.longest:,} tokens)"
        if self.num_too_long:
            line += f": data.max_len is {self.settings.max_len}, {self.longest} would keep all whole"
        return line

    def rows(self, epoch: int) -> int:
        """Return the number of optimiser steps of an epoch; epochs can differ by a few."""
        return len(self._plan(epoch))

    def at(self, epoch: int, row: int, progress: float = 1.0) -> list[LabelledBatch]:
        """Return the micro-batches of one optimiser step, none of them empty. progress: has no effect."""
        limits = {"max_len": self.settings.max_len, "pad_to_multiple": self.settings.pad_to_multiple}
        shares = [self._kept[share] for share in self._plan(epoch)[row]]
        return [collate_labelled(self.store, share, **self._special, **limits) for share in shares if len(share)]

    def next_position(self, epoch: int, row: int) -> tuple[int, int]:
        """Return the position after a step: the next row, or the first row of the next epoch."""
        return (epoch, row + 1) if row + 1 < self.rows(epoch) else (epoch + 1, 0)
