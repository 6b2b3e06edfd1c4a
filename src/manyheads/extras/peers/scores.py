"""A masking convention of peers that our attention does not have, applied from outside while a wrapper runs.

They fill blocked scores with a large negative number, so a query that may attend to nothing attends to all keys
equally.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.nn.attention.masks import Dense, Mask
from manyheads.nn.attention.multi_head import MultiHeadAttention

__all__ = ["decode", "encode", "uniform_when_empty"]


@contextmanager
def uniform_when_empty(module: nn.Module, name: str, allowed: Tensor | None) -> Iterator[Mask | None]:
    """Reproduce the convention in every attention layer called `name` in `module`; yields the mask to pass to it.

    Shape: allowed (batch, heads or 1, q_len or 1, k_len), True = may attend.
    """
    if allowed is None:
        yield None
        return
    empty = ~allowed.any(dim=-1, keepdim=True)
    if not empty.any():
        yield Dense(allowed)
        return

    def score(query: Tensor, key: Tensor) -> Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
        return scores.masked_fill(empty, 0.0)

    layers = [
        layer
        for path, layer in module.named_modules()
        if isinstance(layer, MultiHeadAttention) and path.rpartition(".")[2] == name
    ]
    before = [layer.score for layer in layers]
    try:
        for layer in layers:
            layer.score = score
        yield Dense(allowed | empty)
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.score = old


def encode(model: Seq2Seq, source: Tensor, allowed: Tensor) -> Tensor:
    """Return the encoder's output by this convention.

    Shape: source (batch, source_len) ids, allowed (batch, 1, 1 or source_len, source_len) -> (batch, source_len,
        d_model).
    """
    body = model.body
    with uniform_when_empty(body.encoder, "self_attn", allowed) as mask:
        memory: Tensor = body.encoder(body.source_positions(body.source_embedding(source)), mask)
    return memory


def decode(model: Seq2Seq, target: Tensor, memory: Tensor, allowed: Tensor, memory_allowed: Tensor) -> Tensor:
    """Return the decoder's output by this convention.

    Shape: target (batch, target_len) ids, allowed (batch, 1, 1 or target_len, target_len), memory_allowed (batch, 1, 1
        or target_len, source_len) -> (batch, target_len, d_model).
    """
    body = model.body
    x = body.target_positions(body.target_embedding(target))
    with (
        uniform_when_empty(body.decoder, "self_attn", allowed) as mask,
        uniform_when_empty(body.decoder, "cross_attn", memory_allowed) as memory_mask,
    ):
        hidden: Tensor = body.decoder(x, memory, mask, memory_mask)
    return hidden
