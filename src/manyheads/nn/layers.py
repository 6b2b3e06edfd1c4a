"""The small layers of every model: linear maps, dropout, norms, residual connections and the feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.nn.chunking import in_chunks
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.kernels.linear import READABLE, Packed, linear_by, linear_relu
from manyheads.nn.shapes import Float, check_axes, check_rates, check_sizes, explained


class Linear(nn.Linear):
    """`nn.Linear`, with the same parameters and results, computed by `kernels.linear`.

    >>> Linear(16, 32)(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 32])
    """

    packed: Packed | None = None

    def packed_maps(self) -> tuple[nn.Module, ...]:
        return (self,)

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        return linear_by(self, x)


READABLE.add(Linear)


def initialise(*maps: nn.Linear) -> None:
    """Initialise weights with Xavier-uniform, biases with zero."""
    for one in maps:
        nn.init.xavier_uniform_(one.weight)
        if one.bias is not None:
            nn.init.zeros_(one.bias)


class Dropout(nn.Module):
    """`dropout` in training mode, identity in evaluation.

    Args: rate: fraction of numbers set to zero, from 0 to 1.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        check_rates(dropout=rate)
        self.rate = rate

    def forward(self, x: Tensor, *, shared: bool = False) -> Tensor:
        return dropout(x, self.rate, shared=shared) if self.training else x

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class UnbiasedLayerNorm(nn.Module):
    """weight * (x - mean) / (std + eps) + bias, with std over n - 1 and eps outside the root.

    Differs from `nn.LayerNorm`; needed for weights that were trained with it. As torch's norms do, it computes 16-bit
    numbers in float32: a mean of 100 in bfloat16 is wrong by up to 0.25. Shape: (..., width) -> (..., width).
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(dim=-1, keepdim=True)
        out = self.weight * centred / (wide.std(dim=-1, keepdim=True) + self.eps) + self.bias
        return out.to(torch.promote_types(x.dtype, self.weight.dtype))


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) x weight, in float32 under autocast, as torch computes LayerNorm there.

    Paper: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4. Shape: (..., width) -> (..., width).
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.promote_types(x.dtype, self.weight.dtype)))


def build_norm(kind: Literal["layer", "unbiased", "rms"], width: int, eps: float, bias: bool = True) -> nn.Module:
    """Return the norm for a config's `norm`, `norm_eps` and `bias`, which `rms` does not have.

    Raises: ConfigError: the kind is unknown.
    """
    if kind == "layer":
        return nn.LayerNorm(width, eps=eps, bias=bias)
    if kind == "unbiased":
        return UnbiasedLayerNorm(width, eps=eps)
    if kind == "rms":
        return RMSNorm(width, eps=eps)
    raise ConfigError(f"norm is {kind!r}; it must be 'layer', 'unbiased' or 'rms'.")


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
        if position not in ("post", "pre"):
            raise ConfigError(f"position is {position!r}; it must be 'post' or 'pre'.")
        self.norm = norm
        self.position = position
        self.d_model = getattr(norm, "normalized_shape", (None,))[-1]
        self.dropout = Dropout(dropout)

    @classmethod
    def of(cls, config: Any) -> Residual:
        """Return that of a config with `norm`, `d_model`, `norm_eps`, `bias`, `norm_position` and `dropout`."""
        norm = build_norm(config.norm, config.d_model, config.norm_eps, config.bias)
        return cls(norm, position=config.norm_position, dropout=config.dropout)

    @property
    def wiring(self) -> str:
        """How the sublayer is connected, for drawings: `post` or `pre`; of a reversible layer `reversible`."""
        return self.position

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        norm = "RMS" if isinstance(self.norm, RMSNorm) else "LN"
        return "sublayer's output", f"x + f({norm}(x))" if self.position == "pre" else f"{norm}(x + f(x))"

    @explained
    def forward(
        self, x: Float[Tensor, "*batch length d_model"], sublayer: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "*batch length d_model"]:
        if self.position == "pre":
            out: Tensor = x + self.dropout(sublayer(self.norm(x)))
        else:
            out = self.norm(x + self.dropout(sublayer(x)))
        return out


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

    Paper: Vaswani et al. 2017, sec. 3.3, eq. 2; gated: Shazeer 2020, arXiv:2002.05202, eq. 6. Symbols: W_1 = in_proj
        (the gated layer's V), W_2 = out_proj, W = gate_proj.
    Args:
        d_model: width of input and output.
        d_ff: inner width.
        activation: relu (as in the paper), or another of `ACTIVATIONS`.
        dropout: rate between the two linear layers.
        bias: b_1 and b_2.
        chunk_len: positions that are computed at once (see `nn.chunking`); 0: all.
        gated: W_2 (activation(W x) * W_1 x), each with its bias; with `swish` this is SwiGLU.

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
        gated: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(d_model=d_model, d_ff=d_ff)
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation is {activation!r}; it must be one of {sorted(ACTIVATIONS)}.")
        self.in_proj = Linear(d_model, d_ff, bias=bias)
        self.gate_proj = Linear(d_model, d_ff, bias=bias) if gated else None
        self.out_proj = Linear(d_ff, d_model, bias=bias)
        self.activation = activation
        self.chunk_len = chunk_len
        self.dropout = Dropout(dropout)
        self.reset_parameters()

    @classmethod
    def of(cls, config: Any, d_ff: int) -> FeedForward:
        """Return the layer of a config with `d_model`, `ffn`, `activation`, `feed_forward_dropout` and `bias`."""
        gated = config.ffn == "swiglu"
        activation, dropout = "swish" if gated else config.activation, config.feed_forward_dropout
        return cls(config.d_model, d_ff, activation=activation, dropout=dropout, bias=config.bias, gated=gated)

    def reset_parameters(self) -> None:
        """Initialise weights with Xavier-uniform, biases with zero."""
        initialise(self.in_proj, self.out_proj, *([] if self.gate_proj is None else [self.gate_proj]))

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        name = {"relu": "ReLU", "gelu": "GELU"}.get(self.activation, self.activation.replace("_", " "))
        outer, inner = self.in_proj.in_features, self.in_proj.out_features
        chunks = [f"{self.chunk_len:,} positions at once"] if self.chunk_len else []
        gated = "" if self.gate_proj is None else " gates"
        return "Feed-forward", f"{outer:,} → {inner:,} → {outer:,}, {name}{gated}", *chunks

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        b1, b2 = ("", "") if self.in_proj.bias is None else (" + b₁", " + b₂")
        if self.gate_proj is not None:
            return "feed-forward", f"({self.activation}(x W{b1 and ' + b'}) ⊙ (x W₁{b1})) W₂{b2}"
        inner = f"max(0, x W₁{b1})" if self.activation == "relu" else f"{self.activation}(x W₁{b1})"
        return "feed-forward", f"{inner} W₂{b2}"

    def forward(self, x: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        check_axes("x", x, "batch, length, d_model" if self.chunk_len else "..., d_model", self.in_proj.in_features)
        if not self.chunk_len:
            return self._of_positions(x)
        return in_chunks(self._of_positions, x, self.chunk_len)

    def _of_positions(self, x: Tensor) -> Tensor:
        return self.out_proj(self.dropout(self._inner(x)))  # type: ignore[no-any-return]

    def _inner(self, x: Tensor) -> Tensor:
        """Return the d_ff numbers of each position, before dropout."""
        activate = ACTIVATIONS[self.activation]
        if self.gate_proj is None and self.activation == "relu":
            return linear_relu(self.in_proj, x)
        return activate(self.in_proj(x)) if self.gate_proj is None else activate(self.gate_proj(x)) * self.in_proj(x)
