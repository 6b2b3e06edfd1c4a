"""Dropout (Srivastava et al. 2014) as a module."""

from __future__ import annotations

from torch import Tensor, nn

from manyheads.nn.kernels.dropout import dropout

__all__ = ["Dropout"]


class Dropout(nn.Module):
    """`dropout` in training mode, identity in evaluation.

    Args: rate: fraction of numbers set to zero, from 0 to 1.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, *, shared: bool = False) -> Tensor:
        return dropout(x, self.rate, shared=shared) if self.training else x

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
