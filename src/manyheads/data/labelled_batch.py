"""The input of a classifier: token ids, lengths and labels. This module needs torch alone, as the models do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["LabelledBatch"]


@dataclass(frozen=True)
class LabelledBatch:
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

    def rows(self, which: slice) -> LabelledBatch:
        """Return some of the rows, with the same padding."""
        return replace(self, **{name: getattr(self, name)[which] for name in _TENSORS})

    def to(self, device: torch.device | str) -> LabelledBatch:
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS})


_TENSORS = ("tokens", "lengths", "labels", "sample_ids")
