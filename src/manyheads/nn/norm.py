"""Layer normalisation (Ba et al. 2016), and the variant in the Annotated Transformer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError

__all__ = ["UnbiasedLayerNorm", "build_norm"]


class UnbiasedLayerNorm(nn.Module):
    """weight * (x - mean) / (std + eps) + bias, with std over n - 1 and eps outside the root.

    Differs from `nn.LayerNorm`; needed for weights that were trained with it. Shape: (..., width) -> (..., width).
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return self.weight * centred / (x.std(dim=-1, keepdim=True) + self.eps) + self.bias


def build_norm(kind: Literal["layer", "unbiased"], width: int, eps: float, bias: bool = True) -> nn.Module:
    """Return the norm for a config's `norm`, `norm_eps` and `bias`.

    Raises: ConfigError: the kind is unknown.
    """
    if kind == "layer":
        return nn.LayerNorm(width, eps=eps, bias=bias)
    if kind == "unbiased":
        return UnbiasedLayerNorm(width, eps=eps)
    raise ConfigError(f"norm is {kind!r}; it must be 'layer' or 'unbiased'.")
