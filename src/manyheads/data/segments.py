"""What a language model is given: a segment of every lane, never a mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["SegmentBatch"]


@dataclass(frozen=True)
class SegmentBatch:
    """The next segment of every lane.

    Shape: tokens (lanes, segment_len) int64 ids that the model reads, padded on the right where a lane's part is
        shorter; targets, the same shape: the token after each; lengths (lanes,): real tokens in each row, segment_len
        everywhere in plain streams; resets (lanes,) bool: forget the lane's memory before this segment, where a
        document begins; sample_ids (lanes,): offset in the store of the row's first token, for messages.
        The first `num_context` columns are read as context, and their targets do not count.
    """

    tokens: Tensor
    targets: Tensor
    lengths: Tensor
    resets: Tensor
    sample_ids: Tensor
    num_context: int = 0

    def num_target_tokens(self) -> int:
        """Targets that count in the loss: neither padding nor context."""
        return int((self.lengths - self.num_context).clamp(min=0).sum())

    def to(self, device: torch.device | str) -> SegmentBatch:
        names = ("tokens", "targets", "lengths", "resets", "sample_ids")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})
