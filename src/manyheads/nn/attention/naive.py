"""The slow, obvious attention in float64 that every fast path is held against. One loop a sentence, head and query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["naive_additive_attention", "naive_dot_product_attention"]


def _attend(scores: list[Tensor], values: list[Tensor], width: int) -> Tensor:
    """Softmax over the scores, then the weighted sum of the values; zeros if there is nothing to attend to."""
    if not scores:
        return torch.zeros(width, dtype=torch.float64)
    stacked = torch.stack(scores)
    weights = torch.exp(stacked - stacked.max())
    weights = weights / weights.sum()
    return sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros(width, dtype=torch.float64))


def naive_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Vaswani et al. 2017, eq. 1, one query at a time.

    Shape: query (batch, heads, q_len, head_dim), key (batch, heads, k_len, head_dim), value (batch, heads, k_len,
        value_dim), allowed (batch, heads, q_len, k_len) or broadcastable, True = may attend.
    Returns: (batch, heads, q_len, value_dim) in float64.
    """
    query, key, value = query.double(), key.double(), value.double()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _each_query(lambda b, h, i, j: query[b, h, i].dot(key[b, h, j]) * scale, query, key, value, allowed)


def naive_additive_attention(
    query: Tensor, key: Tensor, value: Tensor, score_weight: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """Bahdanau et al. 2015: score = w_v . tanh(q + k), with q and k already mapped to the hidden width.

    Shape: query (batch, heads, q_len, hidden_dim), key (batch, heads, k_len, hidden_dim), score_weight (heads,
        hidden_dim).
    """
    query, key, value = query.double(), key.double(), value.double()
    weight = score_weight.double()
    return _each_query(
        lambda b, h, i, j: weight[h].dot(torch.tanh(query[b, h, i] + key[b, h, j])), query, key, value, allowed
    )


def _each_query(score, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
    batch, heads, q_len, _ = query.shape
    k_len, width = key.shape[2], value.shape[-1]
    if allowed is None:
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    allowed = allowed.expand(batch, heads, q_len, k_len)
    out = torch.zeros(batch, heads, q_len, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(q_len):
                seen = [j for j in range(k_len) if allowed[b, h, i, j]]
                out[b, h, i] = _attend([score(b, h, i, j) for j in seen], [value[b, h, j] for j in seen], width)
    return out
