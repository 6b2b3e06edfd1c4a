"""The input of a model: token ids, lengths and labels, never masks; and its assembly from the sentences of a store.

The models need this module, so it imports torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.store import PairStore, TokenSide


class RowBatch:
    """The common part of batches: their tensors have an axis of rows."""

    def _with(self, change: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[type-var]

    def rows(self, which: slice) -> Self:
        """Return some of the rows, with the same padding."""
        return self._with(lambda tensor: tensor[which])

    def to(self, device: torch.device | str) -> Self:
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class PairBatch(RowBatch):
    """Aligned sentence pairs as ids, padded on the right.

    Shape: source (batch, source_len), each row tokens + EOS; target (batch, target_len), each row BOS + tokens + EOS;
        lengths (batch,), without padding; sample_ids (batch,), positions in the store. pad_id: the id of padding.
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor
    sample_ids: Tensor
    pad_id: int = 0

    @property
    def target_input(self) -> Tensor:
        """The decoder's input: the target without its last column. (batch, target_len - 1)"""
        return self.target[:, :-1]

    @property
    def target_labels(self) -> Tensor:
        """The decoder's targets: the tokens and EOS. (batch, target_len - 1)"""
        return self.target[:, 1:]

    @property
    def size(self) -> int:
        """Number of ids of the larger side, including padding."""
        return max(self.source.numel(), self.target.numel())

    def describe(self) -> str:
        """Return the shape in words."""
        rows, source_len = self.source.shape
        return f"{rows} rows of {source_len} source and {self.target.shape[1]} target tokens"

    def num_target_tokens(self) -> int:
        """Return the number of labels that count in the loss: real target tokens and EOS, without BOS and padding."""
        return int(self.target_lengths.sum()) - self.target_lengths.numel()


@dataclass(frozen=True)
class SegmentBatch(RowBatch):
    """One segment of each lane.

    Shape: tokens (lanes, length) ids that the model reads, padded on the right with 0; targets (lanes, length) the
        token after each; lengths (lanes,) number of real tokens of each row, including context; resets (lanes,) bool:
        clear the lane's memory before this segment; sample_ids (lanes,) position in the store where the row begins.
        The first `num_context` tokens of each row are read again (`ext_len`), so their targets do not count.
        first_positions (lanes,) position of each row's first token in the model's table of positions; None: all 0.
        memory_len: number of positions in memory that the row attends to; None: all.
    """

    tokens: Tensor
    targets: Tensor
    lengths: Tensor
    resets: Tensor
    sample_ids: Tensor
    num_context: int = 0
    first_positions: Tensor | None = None
    memory_len: int | None = None

    def num_target_tokens(self) -> int:
        """Return the number of targets that count in the loss."""
        return int((self.lengths - self.num_context).clamp(min=0).sum())

    @property
    def size(self) -> int:
        """Number of ids, including padding."""
        return self.tokens.numel()

    def describe(self) -> str:
        """Return the shape in words."""
        lanes, length = self.tokens.shape
        return f"{lanes} lanes of {length} tokens"

    def split(self, parts: int) -> list[SegmentBatch]:
        """Return contiguous groups of lanes, at most one per lane, whose sizes differ by at most one."""
        lanes = len(self.lengths)
        parts = min(parts, lanes)
        return [self.rows(share(lanes, part, parts)) for part in range(parts)]


def share(count: int, part: int, parts: int) -> slice:
    """Return the positions of share `part` of `parts` in `count` items: sizes differ by one at most, larger first.

    >>> [share(5, part, 3) for part in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size, more = divmod(count, parts)
    first = part * size + min(part, more)
    return slice(first, first + size + (part < more))


Lengths = TypeVar("Lengths", int, NDArray[np.integer[Any]])


def collate(
    store: PairStore,
    sample_ids: NDArray[np.integer[Any]],
    *,
    pad_id: int,
    bos_id: int,
    eos_id: int,
    max_source_len: int | None = None,
    max_target_len: int | None = None,
    pad_to_multiple: int = 1,
) -> PairBatch:
    """Return a batch of some samples, in the given order.

    Args:
        store: all samples.
        sample_ids: (batch,) positions in the store, at least one.
        pad_id: the id of padding, on the right.
        bos_id: the first id of each target.
        eos_id: the last id of each source and target.
        max_source_len: longer sources are truncated to this length, which includes EOS.
        max_target_len: longer targets are truncated to this length, which includes BOS and EOS.
        pad_to_multiple: both sides are padded to a multiple of this length, but not beyond the two limits.
    """
    samples = np.asarray(sample_ids, np.int64)
    source, source_lengths = padded_rows(store.source, samples, [], eos_id, pad_id, max_source_len, pad_to_multiple)
    target, target_lengths = padded_rows(
        store.target, samples, [bos_id], eos_id, pad_id, max_target_len, pad_to_multiple
    )
    return PairBatch(
        source=torch.from_numpy(source),
        source_lengths=torch.from_numpy(source_lengths),
        target=torch.from_numpy(target),
        target_lengths=torch.from_numpy(target_lengths),
        sample_ids=torch.from_numpy(samples.copy()),
        pad_id=pad_id,
    )


def round_up(length: Lengths, multiple: int, limit: int | None) -> Lengths:
    """Return the next multiple, or the limit if that is lower; `length` itself is within the limit."""
    rounded = -(-length // multiple) * multiple
    return rounded if limit is None else np.minimum(rounded, limit)


def padded_rows(
    side: TokenSide,
    samples: NDArray[np.int64],
    head: list[int],
    eos_id: int,
    pad_id: int,
    max_len: int | None,
    multiple: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """head + ids + EOS of each sample, padded on the right, (batch, len), and the lengths, (batch,)."""
    begin = len(head)
    starts = side.offsets[samples]
    lengths = side.offsets[samples + 1] - starts
    if max_len is not None:
        lengths = np.minimum(lengths, max_len - begin - 1)
    longest = int(lengths.max(initial=0))
    width = round_up(begin + longest + 1, multiple, max_len)
    batch = np.full((len(samples), width), pad_id, np.int64)
    batch[:, :begin] = head
    columns = np.arange(longest)
    known = columns < lengths[:, None]  # (batch, longest)
    batch[:, begin : begin + longest][known] = side.ids[(starts[:, None] + columns)[known]]
    batch[np.arange(len(samples)), begin + lengths] = eos_id
    return batch, lengths + begin + 1
