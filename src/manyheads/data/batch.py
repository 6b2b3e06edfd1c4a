"""The input of a model: token ids and lengths, never masks. This module needs torch alone, as the models do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["PairBatch", "SegmentBatch"]


@dataclass(frozen=True)
class PairBatch:
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

    def twice(self) -> PairBatch:
        """Return a batch that contains the whole batch twice, one after the other."""
        both: dict[str, Any] = {name: torch.cat([getattr(self, name)] * 2) for name in _PAIR_TENSORS}
        return replace(self, **both)

    def rows(self, which: slice) -> PairBatch:
        """Return some of the rows, with the same padding."""
        return replace(self, **{name: getattr(self, name)[which] for name in _PAIR_TENSORS})

    def to(self, device: torch.device | str) -> PairBatch:
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _PAIR_TENSORS}
        return replace(self, **moved)


@dataclass(frozen=True)
class SegmentBatch:
    """One segment of each lane.

    Shape: tokens (lanes, length) ids that the model reads, padded on the right with 0; targets (lanes, length) the
        token after each; lengths (lanes,) number of real tokens of each row, including context; resets (lanes,) bool:
        clear the lane's memory before this segment; sample_ids (lanes,) position in the store where the row begins.
        The first `num_context` tokens of each row are read again (`ext_len`), so their targets do not count.
    """

    tokens: Tensor
    targets: Tensor
    lengths: Tensor
    resets: Tensor
    sample_ids: Tensor
    num_context: int = 0

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
        size, longer = divmod(lanes, parts)  # the first `longer` groups have one lane more
        bounds = [number * size + min(number, longer) for number in range(parts + 1)]
        return [self.rows(slice(first, last)) for first, last in pairwise(bounds)]

    def to(self, device: torch.device | str) -> SegmentBatch:
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _SEGMENT_TENSORS}
        return replace(self, **moved)

    def rows(self, which: slice) -> SegmentBatch:
        """Return some of the lanes, with the same padding."""
        return replace(self, **{name: getattr(self, name)[which] for name in _SEGMENT_TENSORS})


_PAIR_TENSORS = ("source", "source_lengths", "target", "target_lengths", "sample_ids")
_SEGMENT_TENSORS = ("tokens", "targets", "lengths", "resets", "sample_ids")
