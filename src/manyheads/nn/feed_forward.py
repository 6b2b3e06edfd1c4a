"""The position-wise feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.nn.chunking import in_chunks
from manyheads.nn.dropout import Dropout
from manyheads.nn.linear import Linear, initialise
from manyheads.nn.shapes import Float

__all__ = ["ACTIVATIONS", "FeedForward"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "swish": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}
"""name -> function. `gelu` is exact, `gelu_tanh` and `quick_gelu` are its approximations (Hendrycks and Gimpel 2016,
arXiv:1606.08415); `swish` is SiLU; `squared_relu` is So et al. 2021, arXiv:2109.08668."""


class FeedForward(nn.Module):
    """W_2 activation(W_1 x + b_1) + b_2 at every position.

        >>> FeedForward(d_model=16, d_ff=64)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])

    Paper: Vaswani et al. 2017, sec. 3.3, eq. 2. Symbols: W_1 = in_proj, W_2 = out_proj.
    Args:
        d_model: width of input and output.
        d_ff: inner width.
        activation: relu (as in the paper), or another of `ACTIVATIONS`.
        dropout: rate between the two linear layers.
        bias: b_1 and b_2.
        chunk_len: positions that are computed at once (see `nn.chunking`); 0: all.

    Raises: ConfigError: the activation is unknown.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        chunk_len: int = 0,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation is {activation!r}; it must be one of {sorted(ACTIVATIONS)}.")
        self.in_proj = Linear(d_model, d_ff, bias=bias)
        self.out_proj = Linear(d_ff, d_model, bias=bias)
        self.activation = activation
        self.chunk_len = chunk_len
        self.dropout = Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights with Xavier-uniform, biases with zero."""
        initialise(self.in_proj, self.out_proj)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        name = {"relu": "ReLU", "gelu": "GELU"}.get(self.activation, self.activation.replace("_", " "))
        outer, inner = self.in_proj.in_features, self.in_proj.out_features
        chunks = [f"{self.chunk_len:,} positions at once"] if self.chunk_len else []
        return "Feed-forward", f"{outer:,} → {inner:,} → {outer:,}, {name}", *chunks

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        b1, b2 = ("", "") if self.in_proj.bias is None else (" + b₁", " + b₂")
        inner = f"max(0, x W₁{b1})" if self.activation == "relu" else f"{self.activation}(x W₁{b1})"
        return "feed-forward", f"{inner} W₂{b2}"

    def forward(self, x: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        activate = ACTIVATIONS[self.activation]
        return in_chunks(lambda part: self.out_proj(self.dropout(activate(self.in_proj(part)))), x, self.chunk_len)
