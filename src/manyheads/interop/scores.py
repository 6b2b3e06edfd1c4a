"""Masking conventions of peers that our attention does not have, applied from outside while a wrapper runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.nn.attention.masks import Dense, Mask
from manyheads.nn.attention.multi_head import MultiHeadAttention

__all__ = ["PeerMask", "additive", "scored_as", "uniform_when_empty"]


@dataclass(frozen=True)
class PeerMask:
    """A peer's mask in our terms.

    mask: the allowed keys; None: all. bias: added to the scaled scores. muted: queries, (..., q_len, 1), whose scores
    are
        all zero.
    """

    mask: Mask | None = None
    bias: Tensor | None = None
    muted: Tensor | None = None


def additive(blocked: Tensor | None, bias: Tensor | None) -> PeerMask:
    """Combine torch's two kinds of masks: True = blocked, and added numbers, where -inf blocks.

    Shape: broadcastable to (batch, heads, q_len, k_len).
    """
    allowed = None if blocked is None else ~blocked
    if bias is not None:
        finite = ~torch.isneginf(bias)
        allowed = finite if allowed is None else allowed & finite
        bias = bias.masked_fill(~finite, 0.0)
        if not bias.any():
            bias = None
    return PeerMask(mask=None if allowed is None else Dense(allowed), bias=bias)


def uniform_when_empty(allowed: Tensor) -> PeerMask:
    """Reproduce a mask filled with a large negative number: a query that may attend to nothing attends to all keys
    equally.

    Shape: allowed (batch, heads or 1, q_len or 1, k_len).
    """
    empty = ~allowed.any(dim=-1, keepdim=True)
    return PeerMask(mask=Dense(allowed | empty), muted=empty if bool(empty.any()) else None)


@contextmanager
def scored_as(module: nn.Module, name: str, mask: PeerMask) -> Iterator[Mask | None]:
    """Let every attention layer called `name` in `module` compute the peer's scores; yields the mask to pass."""
    if mask.bias is None and mask.muted is None:
        yield mask.mask
        return

    def score(query: Tensor, key: Tensor) -> Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
        if mask.bias is not None:
            scores = scores + mask.bias
        return scores if mask.muted is None else scores.masked_fill(mask.muted, 0.0)

    layers = [
        layer
        for path, layer in module.named_modules()
        if isinstance(layer, MultiHeadAttention) and path.rpartition(".")[2] == name
    ]
    before = [layer.score for layer in layers]
    try:
        for layer in layers:
            layer.score = score
        yield mask.mask
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.score = old
