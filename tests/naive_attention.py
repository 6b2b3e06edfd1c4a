"""Attention in float64 with one loop per sentence, head and query: the reference for all implementations."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _attend(scores: list[Tensor], values: list[Tensor], width: int) -> Tensor:
    """Softmax over the scores, then the weighted sum of the values; zeros if there is nothing to attend to."""
    if not scores:
        return torch.zeros(width, dtype=torch.float64)
    stacked = torch.stack(scores)
    weights = torch.exp(stacked - stacked.max())
    weights = weights / weights.sum()
    return sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros(width, dtype=torch.float64))


def naive_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None = None,
    scale: float | None = None,
    penalties: Tensor | None = None,
) -> Tensor:
    """Vaswani et al. 2017, eq. 1, one query at a time; with `penalties`, each score less that of its distance.

    Shape: query (batch, heads, q_len, head_dim), key (batch, heads, k_len, head_dim), value (batch, heads, k_len,
        value_dim), allowed (batch, heads, q_len, k_len) or broadcastable, True = may attend; penalties
        (heads, distances).
    Returns: (batch, heads, q_len, value_dim) in float64.
    """
    query, key, value = query.double(), key.double(), value.double()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale

    def score(b: int, h: int, i: int, j: int) -> Tensor:
        found = query[b, h, i].dot(key[b, h, j]) * scale
        return found if penalties is None else found - penalties[h, abs(i - j)]

    return _each_query(score, query, key, value, allowed)


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


def naive_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_distance: Callable[[int], Tensor],
    content_bias: Tensor,
    position_bias: Tensor,
    distance_bias: Callable[[int], Tensor] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Dai et al. 2019, sec. 3.3, one pair of query and key at a time: no shift, the distance is looked up.

    Args:
        query: of the last q_len of the k_len positions.
        of_distance: distance -> r, (heads, head_dim).
        content_bias, position_bias: u and v, (heads, head_dim).
        distance_bias: distance -> a score a head, (heads,).
        allowed: as above; a distance below 0 is asked for where it lets a query see a later key.
    """
    query, key, value = query.double(), key.double(), value.double()
    before = key.shape[2] - query.shape[2]

    def score(b: int, h: int, i: int, j: int) -> Tensor:
        distance = before + i - j
        content = (query[b, h, i] + content_bias[h].double()).dot(key[b, h, j])
        position = (query[b, h, i] + position_bias[h].double()).dot(of_distance(distance)[h].double())
        extra = 0.0 if distance_bias is None else distance_bias(distance)[h].double()
        return (content + position + extra) / math.sqrt(query.shape[-1])

    return _each_query(score, query, key, value, allowed)


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


def naive_lsh_attention(
    qk: Tensor, value: Tensor, buckets: Tensor, chunk_len: int, lengths: list[int] | None = None, scale: float = 1.0
) -> Tensor:
    """Kitaev et al. 2020, sec. 2, one query and one round at a time: it sees the last `chunk_len` positions before it
    that fell into its bucket. It sees itself only if it sees no other position. The rounds are combined by their
    normalisers (eq. 14).

    Shape: qk (batch, heads, length, head_dim), value (batch, heads, length, value_dim), buckets (batch, heads, rounds,
        length).
    """
    qk, value = qk.double(), value.double()
    batch, heads, length, _ = qk.shape
    out = torch.zeros_like(value)
    for b in range(batch):
        for h in range(heads):
            for i in range(length if lengths is None else lengths[b]):
                outputs, normalisers = [], []
                for caught in buckets[b, h]:
                    seen = [j for j in range(i) if caught[j] == caught[i]][-chunk_len:]
                    if seen:
                        scores = [qk[b, h, i].dot(qk[b, h, j]) / qk[b, h, j].norm() * scale for j in seen]
                        outputs.append(_attend(scores, [value[b, h, j] for j in seen], value.shape[-1]))
                        normalisers.append(torch.logsumexp(torch.stack(scores), dim=0))
                out[b, h, i] = _attend(normalisers, outputs, value.shape[-1]) if outputs else value[b, h, i]
    return out
