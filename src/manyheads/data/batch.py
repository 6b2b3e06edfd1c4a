"""The input of a model: token ids, lengths and labels, never masks. Models need it: it imports little but torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from manyheads.errors import ShapeError


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

    @classmethod
    def of(cls, source: Tensor, target: Tensor, pad_id: int = 0) -> Self:
        """Return the batch of ids alone; `pad_id` at the end of a row is padding. source, target: as above.

        Raises: ShapeError: they are no matrices of whole numbers, or have different numbers of rows.
        """
        _check_ids(source, "source", 1)
        _check_ids(target, "target", 2)
        if len(source) != len(target):
            raise ShapeError(f"source has {len(source)} rows and target {len(target)}; each source needs one target.")
        lengths = [
            ((ids != pad_id) * torch.arange(1, ids.shape[1] + 1, device=ids.device)).amax(1) for ids in (source, target)
        ]
        return cls(source, lengths[0], target, lengths[1], torch.arange(len(source)), pad_id)

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

    @classmethod
    def of(cls, ids: Tensor) -> Self:
        """Return the segment in which each id but the last is read, and the next one predicted. ids: (lanes, length).

        Raises: ShapeError: they are no matrix of whole numbers, or have fewer than two columns.
        """
        _check_ids(ids, "ids", 2)
        rows = torch.arange(len(ids), device=ids.device)
        lengths = torch.full_like(rows, ids.shape[1] - 1)
        return cls(ids[:, :-1], ids[:, 1:], lengths, torch.zeros_like(rows, dtype=torch.bool), rows)

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


def _check_ids(ids: Tensor, name: str, fewest: int) -> None:
    if ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] < fewest:
        raise ShapeError(
            f"{name} has shape {tuple(ids.shape)} of {ids.dtype}; ids are whole numbers, (rows, at least {fewest})."
        )


def share(count: int, part: int, parts: int) -> slice:
    """Return the positions of share `part` of `parts` in `count` items: sizes differ by one at most, larger first.

    >>> [share(5, part, 3) for part in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size, more = divmod(count, parts)
    first = part * size + min(part, more)
    return slice(first, first + size + (part < more))
