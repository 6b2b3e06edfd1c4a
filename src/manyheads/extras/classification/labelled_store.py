"""Labelled texts as ids on disk, and the batches of training and evaluation by position.

The format is that of `store`, with two sides: `text`, and `label`, whose sentences have one id each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.batch import RowBatch
from manyheads.data.collate import padded_rows
from manyheads.data.sampler import by_length
from manyheads.data.store import IntArray, SideWriter, StoreFormat, TokenSide, sides_from_lists
from manyheads.errors import DataError
from manyheads.extras.classification.encoders import RowStream

if TYPE_CHECKING:
    from manyheads.extras.classification.settings import LabelledSettings

_FORMAT = StoreFormat("manyheads.labelled", "num_texts", ("text", "label"), ("uint16", "uint32"))


@dataclass(frozen=True)
class LabelledBatch(RowBatch):
    """Texts as ids, padded on the right, with their labels.

    Shape: tokens (batch, len), each row tokens + EOS; lengths (batch,), without padding; labels (batch,) ids of labels;
        sample_ids (batch,), positions in the store.
    """

    tokens: Tensor
    lengths: Tensor
    labels: Tensor
    sample_ids: Tensor

    @property
    def size(self) -> int:
        """Number of ids, including padding."""
        return self.tokens.numel()

    def describe(self) -> str:
        """Return the shape in words."""
        rows, length = self.tokens.shape
        return f"{rows} texts of {length} tokens"

    def num_target_tokens(self) -> int:
        """Return the number of labels, which is what the loss counts."""
        return len(self.labels)


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

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each text, EOS included."""
        return self.text.lengths + 1


def write_labelled(folder: str | Path, rows: Iterable[tuple[Sequence[int] | IntArray, int]], vocab_size: int) -> int:
    """Write a store of (ids, label); it appears under its name only when it is complete.

    Returns: the number of texts. Raises: DataError, SaveError: see `store.write_blocks_of_pairs`.
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
    for samples in by_length(store.lengths, max_tokens):
        yield collate_labelled(store, samples, pad_id=pad_id, eos_id=eos_id)


class LabelledStream(RowStream[LabelledBatch]):
    """The training batches of texts; see `RowStream`. pad_id, eos_id: the tokenizer's."""

    def __init__(
        self, store: LabelledStore, settings: LabelledSettings, seed: int, *, pad_id: int, eos_id: int
    ) -> None:
        super().__init__(store.lengths, settings, seed)
        self.store, self._special = store, {"pad_id": pad_id, "eos_id": eos_id}

    def describe(self) -> str:
        done = {"truncate": "truncated", "drop": "dropped", "fail": "found"}[self.settings.too_long]
        line = f"{len(self._kept):,} of {self.num_rows:,} training texts kept, {self.num_too_long:,} too long and"
        line += f" {done} (the longest has {self.longest:,} tokens)"
        if self.num_too_long:
            line += f": data.max_len is {self.settings.max_len}, {self.longest} would keep all whole"
        return line

    def collate(self, sample_ids: NDArray[np.int64], **limits: Any) -> LabelledBatch:
        return collate_labelled(self.store, sample_ids, **self._special, **limits)
