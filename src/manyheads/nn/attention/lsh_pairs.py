"""Hashed attention pair by pair: every query with every key, under autograd.

It serves callers that need the weights, is the reference for the computation by chunks, and, if all earlier pairs are
visible, is exact attention with shared queries and keys. Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.nn.attention.lsh_hash import sort_positions
from manyheads.nn.attention.lsh_settings import LSHSettings
from manyheads.nn.attention.masks import zero_padding
from manyheads.nn.chunking import chunk_slices
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.shapes import Float, Int

__all__ = ["keys_of", "near_pairs", "pair_weights", "shared_qk_attention", "visible_pairs"]

# The largest number of scores that exact attention computes at once.
_TILE_NUMBERS = 1 << 20


def keys_of(
    qk: Float[Tensor, "*rows head_dim"], scale: float = 1.0, eps: float = 1e-6
) -> Float[Tensor, "*rows head_dim"]:
    """Return queries as keys of length `scale`: k = scale x q / sqrt(q.q + eps x head_dim).

    Paper: Kitaev et al. 2020, sec. 2, "Shared-QK Transformer": k = q / |q|.
    """
    wide = qk.to(torch.promote_types(qk.dtype, torch.float32))
    size = torch.sqrt(wide.square().sum(dim=-1, keepdim=True) + eps * qk.shape[-1])
    return (wide * (scale / size)).to(qk.dtype)


def visible_pairs(
    buckets: Int[Tensor, "batch heads rounds length"],
    settings: LSHSettings,
    lengths: Int[Tensor, " batch"] | None = None,
) -> Int[Tensor, "batch heads rounds length length"]:
    """Return how often query i sees key j in each round, at [..., i, j]; a query does not see itself.

    Cost: O(rounds x length^2) time and memory.
    """
    length = buckets.shape[-1]
    if lengths is not None and buckets.numel():
        padded = torch.arange(length, device=buckets.device) >= lengths[:, None, None, None]
        buckets = torch.where(padded, buckets.amax() + 1, buckets)
    positions = torch.arange(length, device=buckets.device)
    allowed = positions[:, None] > positions if settings.causal else positions[:, None] != positions
    if lengths is not None:
        allowed = allowed & (positions < lengths[:, None, None, None, None])
    return near_pairs(buckets, settings) * allowed


def near_pairs(
    buckets: Int[Tensor, "batch heads rounds length"], settings: LSHSettings
) -> Int[Tensor, "batch heads rounds length length"]:
    """Return how often the rank of a query in a round lets it see a key, without regard to causality and itself."""
    ordered = sort_positions(buckets, settings.chunk_len)
    query, key = ordered.ranks[..., :, None], ordered.ranks[..., None, :]
    together = buckets[..., :, None] == buckets[..., None, :]
    if settings.visible == "bucket":
        seen = together & (query > key) & (query - key <= settings.chunk_len)
    else:
        seen = _neighbours(ordered.ranks // settings.chunk_len, ordered.num_chunks, settings)
        if settings.within_bucket:
            seen = seen * together
    return seen.long()


def _neighbours(chunks: Tensor, num_chunks: int, settings: LSHSettings) -> Tensor:
    """Return how often the chunk of a query has the chunk of a key as neighbour, summed over the rounds of the key.

    With `look_across_rounds` the chunk can be in another round. chunks: (batch, heads, rounds, length).
    """
    rounds = chunks.shape[2]
    count = chunks.new_zeros(*chunks.shape, chunks.shape[-1])
    for turn in range(rounds):
        for offset in range(-settings.chunks_before, settings.chunks_after + 1):
            wanted = chunks[:, :, turn] + offset
            other = torch.full_like(wanted, turn)
            if settings.look_across_rounds:
                other, wanted = other + wanted.div(num_chunks, rounding_mode="floor"), wanted % num_chunks
                other = other % rounds if settings.wrap else other
            elif settings.wrap:
                wanted = wanted % num_chunks
            # Numbers of buckets are comparable within a round only.
            for key_turn in [turn] if settings.within_bucket else range(rounds):
                found = (wanted[..., :, None] == chunks[:, :, key_turn, None, :]) & (other == key_turn)[..., None]
                count[:, :, turn] += found
    return count


def pair_weights(
    qk: Float[Tensor, "batch heads length head_dim"],
    counts: Tensor,
    scale: float = 1.0,
    eps: float = 1e-6,
) -> Float[Tensor, "batch heads length length"]:
    """Return the attention weights; a query that sees no key has weight 1 for itself.

    Args: counts: (batch, heads, length, length), how often a pair counts over all rounds; 0 hides it.
    """
    scores = torch.matmul(qk, keys_of(qk, scale, eps).transpose(-1, -2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    itself = torch.eye(qk.shape[2], dtype=torch.bool, device=qk.device)
    alone = ~(counts > 0).any(dim=-1, keepdim=True)
    scores = torch.where(alone, torch.zeros_like(scores), scores)  # such a query has no gradient
    shown = torch.where(alone & itself, 0.0, counts.to(scores.dtype).log())
    return torch.softmax(scores + shown, dim=-1).to(qk.dtype)


def shared_qk_attention(
    qk: Float[Tensor, "batch heads length head_dim"],
    v: Float[Tensor, "batch heads length value_dim"],
    *,
    causal: bool = True,
    lengths: Int[Tensor, " batch"] | None = None,
    dropout_rate: float = 0.0,
    scale: float = 1.0,
    eps: float = 1e-6,
) -> Float[Tensor, "batch heads length value_dim"]:
    """Attend exactly with shared queries and keys: a position sees itself only if it sees no other.

    Paper: Kitaev et al. 2020, sec. 2, "Shared-QK Transformer", and "full attention" of table 2.
    Returns: zeros at positions beyond the length of a row.
    Cost: O(length^2) time; memory for the scores of some queries at a time, without gradients.
    """
    batch, heads, length, _ = qk.shape
    keys = keys_of(qk, scale, eps).transpose(-1, -2)
    positions = torch.arange(length, device=qk.device)
    step = max(1, _TILE_NUMBERS // max(1, batch * heads * length))
    parts = []
    for part in chunk_slices(length, step):
        rows = positions[part]
        allowed = (rows[:, None] > positions if causal else rows[:, None] != positions)[None, None]
        if lengths is not None:
            allowed = allowed & (positions < lengths[:, None, None, None])
        alone = ~allowed.any(dim=-1, keepdim=True)
        end = part.stop if causal else length
        scores = torch.matmul(qk[:, :, part], keys[..., :end])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        allowed = (allowed | (alone & (rows[:, None] == positions)))[..., :end]
        scores = scores.masked_fill(~allowed, -torch.inf)
        weights = dropout(torch.softmax(scores, dim=-1).to(v.dtype), dropout_rate)
        parts.append(torch.matmul(weights, v[:, :, :end]))
    return zero_padding(torch.cat(parts, dim=2), lengths)
