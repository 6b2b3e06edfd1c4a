"""The position-wise feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.nn.dropout import Dropout

__all__ = ["FeedForward"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}


class FeedForward(nn.Module):
    """W_2 activation(W_1 x + b_1) + b_2 at every position alike.

    Paper: Vaswani et al. 2017, sec. 3.3, eq. 2. Symbols: W_1 = in_proj, W_2 = out_proj.
    Args:
        d_model: width of input and output.
        d_ff: inner width.
        activation: relu (the paper's), gelu (exact), or swish.
        dropout: rate between the two maps.
        bias: b_1 and b_2.

    Raises: ConfigError: the activation is unknown.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Literal["relu", "gelu", "swish"] = "relu",
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ConfigError(f"activation is {activation!r}; it must be one of {sorted(_ACTIVATIONS)}.")
        self.in_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.out_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = activation
        self.dropout = Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform weights, zero biases."""
        for linear in (self.in_proj, self.out_proj):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        out: Tensor = self.out_proj(self.dropout(_ACTIVATIONS[self.activation](self.in_proj(x))))
        return out
