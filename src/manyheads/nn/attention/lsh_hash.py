"""Hashed attention as formulas: vectors are hashed into buckets and sorted by them, and each pair of positions is
visible or not.

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2, "Locality sensitive hashing".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.errors import ShapeError
from manyheads.nn.attention.masks import zero_padding
from manyheads.nn.chunking import chunk_slices
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.dropout import dropout

if TYPE_CHECKING:
    from manyheads.nn.attention.settings import LSHSettings
    from manyheads.nn.shapes import Float, Int


def rotations(
    seed: int | Tensor,
    num_heads: int,
    head_dim: int,
    num_hashes: int,
    factors: tuple[int, ...],
    device: torch.device | None = None,
) -> Float[Tensor, "heads head_dim rounds directions"]:
    """Return random directions for hashing, which depend on the seed only, not on the device.

    Paper: Kitaev et al. 2020, sec. 2, "Locality sensitive hashing". Symbols: R = the result, b = product of `factors`.
    Args:
        seed: of a separate generator; torch's global generator is not used.
        factors: factors of the number of buckets; each factor has factor / 2 adjacent directions.

    Returns: standard normal numbers in float32; (heads, head_dim, rounds, sum of factors / 2).
    """
    generator, shape = torch.Generator().manual_seed(int(seed)), (num_heads, head_dim, num_hashes, sum(factors) // 2)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device or "cpu")


def hash_vectors(
    vectors: Float[Tensor, "batch heads length head_dim"],
    rotations: Float[Tensor, "heads head_dim rounds directions"],
    factors: tuple[int, ...],
) -> Int[Tensor, "batch heads rounds length"]:
    """Return the bucket of each vector in each round, from 0 to the product of the factors - 1.

    Computed at least in float32 for every dtype of the vectors, and outside autocast.

    Paper: Kitaev et al. 2020, sec. 2: h(x) = argmax([xR; -xR]); with factors b1 x b2: h1 + b1 h2.
    Raises: ShapeError: the number of directions is not half the sum of the factors, or heads or widths differ.
    """
    check_rotations(vectors, rotations, factors)
    heads, head_dim, rounds, directions = rotations.shape
    precise = torch.promote_types(vectors.dtype, torch.float32)
    batch, _, length, _ = vectors.shape
    buckets = vectors.new_zeros(batch, heads, rounds, length, dtype=torch.int64)
    with torch.no_grad(), policy.without_autocast(vectors.device):
        across = rotations.to(precise).permute(0, 2, 3, 1).reshape(heads, rounds * directions, head_dim)
        step = policy.lsh_hashed_at_once(batch * heads * rounds * directions, vectors.device)
        for some in chunk_slices(length, step):
            rotated = torch.matmul(across, vectors[:, :, some].detach().to(precise).transpose(-1, -2))
            # (batch, heads, rounds, directions, some)
            rotated = rotated.view(batch, heads, rounds, directions, rotated.shape[-1])
            first, below = 0, 1
            for factor in factors:
                found = _farthest(rotated[:, :, :, first : first + factor // 2])
                buckets[..., some].add_(found, alpha=below)
                first, below = first + factor // 2, below * factor
    return buckets


def check_rotations(vectors: Tensor, rotations: Tensor, factors: tuple[int, ...]) -> None:
    """Raise a ShapeError if `hash_vectors` cannot hash these vectors."""
    heads, head_dim, _, directions = rotations.shape
    if 2 * directions != sum(factors) or (heads, head_dim) != (vectors.shape[1], vectors.shape[3]):
        raise ShapeError(
            f"rotations of shape {tuple(rotations.shape)} (heads, head_dim, rounds, directions) do not hash vectors of"
            f" shape {tuple(vectors.shape)} (batch, heads, length, head_dim) into {factors} buckets."
        )


def _farthest(rotated: Tensor) -> Tensor:
    """Return the argmax over axis 3 of [rotated; -rotated], the first of equal values.

    On a CPU it loops over the directions: torch's argmax over an axis that is not the last is several times slower.
    """
    if policy.saves_launches(rotated.device):
        return torch.cat([rotated, -rotated], dim=3).argmax(dim=3)
    directions = rotated.unbind(3)
    best = directions[0].clone()
    found = torch.zeros_like(best, dtype=torch.int32)
    for number in range(1, 2 * len(directions)):
        here = directions[number] if number < len(directions) else -directions[number - len(directions)]
        found.masked_fill_(here > best, number)
        best = torch.maximum(best, here, out=None if modes.is_transformed() else best)
    return found


def mark_padding(
    buckets: Int[Tensor, "batch heads rounds length"], lengths: Int[Tensor, " batch"] | None, num_buckets: int
) -> Int[Tensor, "batch heads rounds length"]:
    """Return the buckets with positions beyond the length of their row in one more bucket, `num_buckets`."""
    if lengths is None:
        return buckets
    padded = torch.arange(buckets.shape[-1], device=buckets.device) >= lengths[:, None]
    return buckets.masked_fill(padded[:, None, None], num_buckets)


@dataclass(frozen=True)
class SortedPositions:
    """The positions of each round, sorted by bucket and then by position, and cut into chunks.

    Shape: order, buckets (*rows, chunks x chunk_len): the position in each slot of the sorted sequence, and its
        bucket; at the end, positions from `length` on fill the last chunk. ranks (*rows, length): the slot of each
        position, the inverse of order. All int64. Rows are batch, heads and rounds.
    """

    order: Tensor
    buckets: Tensor
    ranks: Tensor
    chunk_len: int

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a round."""
        return self.order.shape[-1] // self.chunk_len


def sort_positions(buckets: Int[Tensor, "*rows length"], chunk_len: int) -> SortedPositions:
    """Sort the positions of each round by (bucket, position)."""
    length = buckets.shape[-1]
    padded = -(-length // chunk_len) * chunk_len
    positions = torch.arange(length, device=buckets.device)
    # One sort key holds both: bucket x padded + position. Both can be recovered from it.
    keys = torch.sort(buckets.long() * padded + positions, dim=-1).values
    if padded > length:
        filling = keys[..., -1:] // padded * padded + padded + torch.arange(length, padded, device=buckets.device)
        keys = torch.cat([keys, filling], dim=-1)
    order, in_order = keys % padded, keys // padded
    ranks = torch.empty_like(order).scatter(-1, order, torch.arange(padded, device=keys.device).expand_as(order))
    return SortedPositions(order=order, buckets=in_order, ranks=ranks[..., :length], chunk_len=chunk_len)


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
