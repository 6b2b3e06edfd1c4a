"""Dropout (Srivastava et al. 2014), as a function and as a module."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Dropout", "dropout"]


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zero each number with probability `rate` and divide the rest by 1 - rate; x itself at rate 0.

    The numbers come from torch's generator of the device, so `torch.manual_seed` replays them.
    """
    return F.dropout(x, rate, training=True) if rate else x


class Dropout(nn.Module):
    """`dropout` in training mode, identity in evaluation.

    Args: rate: share of numbers set to zero, in [0, 1).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate) if self.training else x

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
