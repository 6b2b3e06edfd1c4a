"""Pooling: one vector for a whole text, from the states of its positions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.nn.dropout import Dropout
from manyheads.nn.shapes import Float, Int

__all__ = ["Pooling", "TextPooling"]

Pooling = Literal["mean", "first"]
"""The vector of a text: the mean of the states of its real positions, or the state of its first position."""


class TextPooling(nn.Module):
    """The vector of each text, with dropout.

        >>> pool = TextPooling("mean")
        >>> pool(torch.randn(2, 5, 16), torch.tensor([5, 2])).shape
        torch.Size([2, 16])

    States at padding are never read: whatever they contain, NaN included, the result is the same.

    Args:
        kind: see `Pooling`.
        dropout: on the vector.
    """

    def __init__(self, kind: Pooling, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.dropout = Dropout(dropout)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        return "Pooling", self.equation()[1]

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        return "text vector", "h₁" if self.kind == "first" else "mean of the real positions' h"

    def forward(
        self, hidden: Float[Tensor, "batch len width"], lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch width"]:
        """Return the vectors. lengths: number of real positions; padding on the right. The mean of none is zeros."""
        if self.kind == "first":
            return self.dropout(hidden[:, 0])  # type: ignore[no-any-return]
        padding = torch.arange(hidden.shape[1], device=hidden.device) >= lengths[:, None]  # (batch, len)
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        mean = wide.masked_fill(padding[:, :, None], 0.0).sum(1) / lengths[:, None].clamp(min=1)
        return self.dropout(mean.to(hidden.dtype))  # type: ignore[no-any-return]
