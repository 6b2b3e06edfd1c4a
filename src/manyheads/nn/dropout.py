"""Dropout (Srivastava et al. 2014), as a function and as a module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Dropout", "dropout", "scaled_mask"]

_LEVELS = 1 << 16


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zero each number with probability `rate` and divide the rest by 1 - rate; x itself at rate 0.

    The numbers come from torch's generator of the device, so `torch.manual_seed` replays them. On a CPU four numbers
    share one draw of 64 bits, several times as fast as torch's own dropout (decision 007); the probability is then
    `rate` to the nearest 1/65536, and the divisor is that of the rounded rate, so the expectation is exactly x.
    """
    if not rate:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():  # GPUs and compilers fuse theirs
        return F.dropout(x, rate, training=True)
    return x * scaled_mask(x, rate)


def scaled_mask(x: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Zeros, and 1 / (1 - rate) where x is kept; in the shape and type of x. generator: None is the device's own."""
    if x.device.type != "cpu" and generator is None:
        return F.dropout(torch.ones_like(x), rate, training=True)
    dropped = min(round(rate * _LEVELS), _LEVELS - 1)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    draws.random_(-(1 << 63), None, generator=generator)
    levels = draws.view(torch.int16)[: x.numel()].view(x.shape)
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ge(levels, dropped - _LEVELS // 2, out=mask)
    return mask.mul_(_LEVELS / (_LEVELS - dropped))


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
