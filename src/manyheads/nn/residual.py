"""The residual connection around a sublayer, with its norm before or after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from manyheads.nn.dropout import Dropout

__all__ = ["Residual"]


class Residual(nn.Module):
    """`post`: LN(x + dropout(f(x))); `pre`: x + dropout(f(LN(x))).

        >>> import torch
        >>> residual = Residual(nn.LayerNorm(16), position="pre", dropout=0.1)
        >>> residual(torch.randn(2, 5, 16), nn.Linear(16, 16)).shape
        torch.Size([2, 5, 16])

    Paper: Vaswani et al. 2017, sec. 3.1 and 5.4 (post); Xiong et al. 2020, arXiv:2002.04745 (pre).
    Args:
        norm: the norm of this sublayer.
        position: position of the norm.
        dropout: rate on the sublayer's output.
    """

    def __init__(self, norm: nn.Module, *, position: Literal["post", "pre"], dropout: float) -> None:
        super().__init__()
        self.norm = norm
        self.position = position
        self.dropout = Dropout(dropout)

    @property
    def wiring(self) -> str:
        """How the sublayer is connected, for drawings: `post` or `pre`; of a reversible layer `reversible`."""
        return self.position

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        return "sublayer's output", "x + f(LN(x))" if self.position == "pre" else "LN(x + f(x))"

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.position == "pre":
            out: Tensor = x + self.dropout(sublayer(self.norm(x)))
        else:
            out = self.norm(x + self.dropout(sublayer(x)))
        return out
