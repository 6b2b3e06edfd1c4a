"""The tutorial with one projection for queries, keys and values: scaled dot products, positions, multi-head attention.

    from manyheads.extras.texts.fused_qkv import MultiheadAttention, position_encoding, scaled_dot_product

`EncoderBlock`, `TransformerEncoder`, `PositionalEncoding` and `CosineWarmupScheduler` are those of the longer text that
it follows, the University of Amsterdam's; its training classes are of Lightning and not here.

The same numbers as the text's code, also for a query that may attend to no key: equal weights for all keys. Repaired:
`input_dim` may differ from `embed_dim`; a mask (batch, length, length) is one for each sentence, where the text takes
its first axis for the heads; the positions have their first frequency; `get_attention_maps` gives the mask to every
layer, where the text's layers compute their outputs without it; with 0 steps of warm-up the rate begins at its highest
value.

In masks 0 (or False) = blocked.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import nn as ours
from manyheads.errors import ConfigError, ShapeError
from manyheads.extras.texts.common import (
    TextShapeError,
    also,
    check_at_least,
    check_heads,
    check_shape,
    dropout_layer,
    explain,
    fits,
    read_arguments,
    refuse_added,
    shape_of,
    table_of_positions,
)
from manyheads.nn.shapes import no_tensor

__all__ = [
    "CosineWarmupScheduler",
    "EncoderBlock",
    "MultiheadAttention",
    "PositionalEncoding",
    "TransformerEncoder",
    "expand_mask",
    "position_encoding",
    "scaled_dot_product",
]


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(d_k)) v, and the weights.

        >>> values, attention = scaled_dot_product(*torch.randn(3, 3, 2))
        >>> values.shape, attention.shape
        (torch.Size([3, 2]), torch.Size([3, 3]))

    Shape: q (..., q_len, d_k), k (..., k_len, d_k), v (..., k_len, width), mask broadcastable to (..., q_len, k_len).
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        shape_of(name, x, "..., length, width")
    shapes = f"q, k and v have shapes {_shape(q)}, {_shape(k)} and {_shape(v)}"
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise also(ShapeError, RuntimeError, IndexError)(
            f"{shapes}; each must have two axes or more: length and width."
        )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise also(ShapeError, RuntimeError)(
            f"{shapes}; q and k must have one width, the last axis, and k and v one length, the axis before it."
        )
    if not all(_broadcast(*pair) for pair in combinations([_shape(x)[:-2] for x in (q, k, v)], 2)):
        raise also(ShapeError, RuntimeError)(f"{shapes}; the axes before length and width must be equal, or 1.")
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    allowed = None if mask is None else _allowed(mask, tuple(scores.shape))
    attention = ours.masked_softmax(scores, allowed, "uniform")
    return torch.matmul(attention, v), attention


def expand_mask(mask: Tensor) -> Tensor:
    """Return a mask with four axes: (q_len, k_len) and (batch, q_len, k_len) get axes for batch and heads."""
    shape_of("mask", mask, "batch, heads, q_len, k_len")
    if mask.dim() not in (2, 3, 4):
        raise also(ShapeError, AssertionError)(
            f"the mask has shape {_shape(mask)}; it must be (q_len, k_len), (batch, q_len, k_len) or (batch, heads,"
            " q_len, k_len)."
        )
    if mask.dim() == 3:
        return mask[:, None]
    return mask[None, None] if mask.dim() == 2 else mask


_POSITIONS = tuple(f"{length}, {width}, n=10000" for length in ("seq_len", "max_len") for width in ("d_model", "d"))


def position_encoding(*args: Any, **kwargs: Any) -> Tensor:
    """Return sines in even columns and cosines in odd ones, (seq_len, d_model), in the default type of torch.

        >>> position_encoding(2, 4)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])

    Copies of the text name the arguments differently.

    Editions: position_encoding(seq_len, d_model, n=10000); also max_len for seq_len, and d for d_model. The frequencies
        are n^(-2i / d_model).
    """
    _, sizes = read_arguments("position_encoding", _POSITIONS, args, kwargs)
    seq_len, d_model, n = sizes.values()
    is_number = isinstance(n, int | float)
    if not (
        isinstance(seq_len, int) and isinstance(d_model, int) and seq_len >= 0 and d_model >= 1 and is_number and n > 0
    ):
        raise also(ConfigError, TypeError, RuntimeError, ValueError)(
            f"seq_len is {seq_len!r}, d_model {d_model!r} and n {n!r}; give a whole number of positions, a width of 1"
            " or more, and a number above 0."
        )
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angles = torch.arange(seq_len, dtype=torch.float64)[:, None] * float(n) ** (-even / d_model)
    table = torch.empty(seq_len, d_model, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()[:, : d_model // 2]
    return table.to(torch.get_default_dtype())


class MultiheadAttention(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values; its rows are ordered by head.

    >>> attention = MultiheadAttention(input_dim=16, embed_dim=16, num_heads=4)
    >>> out, weights = attention(torch.randn(2, 5, 16), return_attention=True)
    >>> out.shape, weights.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 5]))
    """

    def __init__(self, input_dim: int, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        check_at_least(1, input_dim=input_dim)
        check_heads(embed_dim, num_heads, ("embed_dim", "num_heads"), AssertionError, ZeroDivisionError, TypeError)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv_proj = nn.Linear(input_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Xavier-uniform over the whole matrix of queries, keys and values, whose bound is smaller than that of three
        matrices: standard deviation 0.031 at width 512, not 0.044. Biases are zero.
        """
        for layer in (self.qkv_proj, self.o_proj):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return (batch, length, embed_dim), and on request the weights (batch, heads, length, length).

        Args:
            x: (batch, length, input_dim).
            mask: (length, length), (batch, length, length) or (batch, heads, length, length); 0 = blocked. With as many
                sentences as heads three axes are refused, because the text takes the first for the heads.
        """
        if len(shape_of("x", x, "batch, length, input_dim")) != 3:
            hint = "; of one sentence make a batch of one: x[None]" if x.dim() == 2 else ""
            raise also(ShapeError, ValueError)(f"x has shape {_shape(x)}; it must be (batch, length, input_dim){hint}.")
        if x.shape[2] != self.qkv_proj.in_features:
            raise also(ShapeError, RuntimeError)(
                f"x has shape {_shape(x)}, a width of {x.shape[2]}, but input_dim is {self.qkv_proj.in_features};"
                " change one of them."
            )
        batch, length = x.shape[:2]
        qkv = self.qkv_proj(x).reshape(batch, length, self.num_heads, 3 * self.head_dim).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        values, attention = scaled_dot_product(q, k, v, None if mask is None else self._four_axes(mask, batch))
        out: Tensor = self.o_proj(ours.merge_heads(values))
        return (out, attention) if return_attention else out

    def _four_axes(self, mask: Any, batch: int) -> Any:
        if not isinstance(mask, Tensor) or mask.dim() != 3 or mask.shape[0] == 1:
            return mask
        if mask.shape[0] == batch == self.num_heads:
            raise ShapeError(
                f"a mask of shape {_shape(mask)} may mean (batch, length, length) or (heads, length, length), because"
                f" there are {batch} sentences and {batch} heads; say which by a fourth axis: mask[:, None] or"
                " mask[None]."
            )
        return expand_mask(mask) if mask.shape[0] == batch else mask


class EncoderBlock(nn.Module):
    """Self-attention and a feed-forward network, each with a residual connection and then a norm ("post").

    Shape: (batch, length, input_dim) in and out; masks as in `MultiheadAttention`.
    """

    def __init__(self, input_dim: int, num_heads: int, dim_feedforward: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_at_least(1, dim_feedforward=dim_feedforward)
        self.self_attn = MultiheadAttention(input_dim, input_dim, num_heads)
        self.linear_net = nn.Sequential(
            nn.Linear(input_dim, dim_feedforward),
            dropout_layer(dropout),
            nn.ReLU(inplace=True),
            nn.Linear(dim_feedforward, input_dim),
        )
        self.norm1, self.norm2 = nn.LayerNorm(input_dim), nn.LayerNorm(input_dim)
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._after_attention(x, self.self_attn(x, mask=mask))

    def _after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(attended))
        out: Tensor = self.norm2(x + self.dropout(self.linear_net(x)))
        return out

    def _with_weights(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        attended, weights = self.self_attn(x, mask=mask, return_attention=True)
        return self._after_attention(x, attended), weights


class TransformerEncoder(nn.Module):
    """`num_layers` blocks. block_args: those of `EncoderBlock`. Shape: (batch, length, input_dim) in and out."""

    def __init__(self, num_layers: int, **block_args: Any) -> None:
        super().__init__()
        check_at_least(0, num_layers=num_layers)
        self.layers = nn.ModuleList(self._block(block_args) for _ in range(num_layers))

    @staticmethod
    def _block(block_args: dict[str, Any]) -> EncoderBlock:
        signature = ("input_dim, num_heads, dim_feedforward, dropout=0",)
        return EncoderBlock(**read_arguments("EncoderBlock", signature, (), block_args)[1])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x

    @torch.no_grad()
    def get_attention_maps(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Return the weights of every layer, (batch, heads, length, length)."""
        attention_maps = []
        for layer in self.layers:
            assert isinstance(layer, EncoderBlock)
            x, weights = layer._with_weights(x, mask)
            attention_maps.append(weights)
        return attention_maps


class PositionalEncoding(nn.Module):
    """x + pe[:, :length]; `pe` (1, max_len, d_model) has sines and cosines, and is no part of the state dict."""

    pe: Tensor

    def __init__(self, d_model: int, max_len: int = 5000) -> None:
        super().__init__()
        check_at_least(1, d_model=d_model, max_len=max_len)
        self.register_buffer("pe", table_of_positions(max_len, d_model), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, length, d_model) in and out."""
        check_shape("x", x, ["batch", "length", self.pe.shape[2]])
        if x.shape[1] > self.pe.shape[1]:
            raise TextShapeError(
                f"x has {x.shape[1]} positions, but the table only {self.pe.shape[1]}; shorten x, or give max_len."
            )
        return x + self.pe[:, : x.shape[1]]


class CosineWarmupScheduler(torch.optim.lr_scheduler.LRScheduler):
    """Half a cosine from 1 to 0 over `max_iters` steps, times a line from 0 to 1 over the first `warmup` steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int, max_iters: int) -> None:
        check_at_least(0, warmup=warmup)
        check_at_least(1, max_iters=max_iters)
        self.warmup = warmup
        self.max_num_iters = max_iters
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of every group of parameters."""
        factor = self.get_lr_factor(epoch=self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    def get_lr_factor(self, epoch: int) -> float:
        """Return what the learning rates are multiplied by in a step."""
        factor = 0.5 * (1 + math.cos(math.pi * epoch / self.max_num_iters))
        return factor * min(1.0, epoch / self.warmup) if self.warmup else factor


def _allowed(mask: object, scores: tuple[int, ...]) -> Tensor:
    """Return the mask as True = may attend; it is checked against the shape of the scores."""
    if not isinstance(mask, Tensor):
        raise no_tensor("the mask", mask, "..., q_len, k_len")
    refuse_added(mask)
    if not fits(_shape(mask), scores):
        raise also(ShapeError, RuntimeError)(
            f"the mask has shape {_shape(mask)}, which does not fit scores of shape {scores}; the last two axes are"
            " (q_len, k_len), and an axis may be 1. A mask of lengths is torch.arange(k_len) < lengths[:, None, None,"
            " None]."
        )
    return mask != 0


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(one[::-1], other[::-1], strict=False))


explain(globals())
