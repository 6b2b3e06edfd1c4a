"""Hashing vectors into buckets, and sorting positions by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.errors import ShapeError
from manyheads.nn.chunking import chunk_slices
from manyheads.nn.shapes import Float, Int

__all__ = ["SortedPositions", "hash_vectors", "mark_padding", "rotations", "sort_positions"]

# Rotated vectors' numbers that exist at once.
_ROTATED_NUMBERS = 1 << 22


def rotations(
    seed: int | Tensor,
    num_heads: int,
    head_dim: int,
    num_hashes: int,
    factors: tuple[int, ...],
    device: torch.device | None = None,
) -> Float[Tensor, "heads head_dim rounds directions"]:
    """Random directions to hash by, the same for a seed on every device.

    Paper: Kitaev et al. 2020, sec. 2, "Locality sensitive hashing". Symbols: R = the result, b = the factors' product.
    Args:
        seed: of a generator of its own: torch's global one is not touched.
        factors: of the number of buckets; a factor b owns b / 2 directions, side by side.

    Returns: standard normal numbers in float32; (heads, head_dim, rounds, sum of factors / 2).
    """
    generator = torch.Generator().manual_seed(int(seed))
    drawn = torch.randn(num_heads, head_dim, num_hashes, sum(factors) // 2, generator=generator, dtype=torch.float32)
    return drawn.to(device)


def hash_vectors(
    vectors: Float[Tensor, "batch heads length head_dim"],
    rotations: Float[Tensor, "heads head_dim rounds directions"],
    factors: tuple[int, ...],
) -> Int[Tensor, "batch heads rounds length"]:
    """The bucket of every vector in every round, from 0 to the factors' product.

    Paper: Kitaev et al. 2020, sec. 2: h(x) = argmax([xR; -xR]); with factors b1 x b2: h1 + b1 h2.
    In float32 at least, whatever the vectors' type, and outside autocast.
    Raises: ShapeError: the rotations' directions are not half the factors' sum.
    """
    heads, head_dim, rounds, directions = rotations.shape
    if 2 * directions != sum(factors) or (heads, head_dim) != (vectors.shape[1], vectors.shape[3]):
        raise ShapeError(
            f"rotations of shape {tuple(rotations.shape)} (heads, head_dim, rounds, directions) do not hash vectors of"
            f" shape {tuple(vectors.shape)} (batch, heads, length, head_dim) into {factors} buckets."
        )
    precise = torch.promote_types(vectors.dtype, torch.float32)
    batch, _, length, _ = vectors.shape
    buckets = torch.zeros(batch, heads, rounds, length, dtype=torch.int64, device=vectors.device)
    with torch.no_grad(), torch.autocast(vectors.device.type, enabled=False):
        across = rotations.to(precise).permute(0, 2, 3, 1).reshape(heads, rounds * directions, head_dim)
        step = max(1, _ROTATED_NUMBERS // max(1, batch * heads * rounds * directions))
        for some in chunk_slices(length, step):
            rotated = torch.matmul(across, vectors[:, :, some].detach().to(precise).transpose(-1, -2))
            # (batch, heads, rounds, directions, some)
            rotated = rotated.view(batch, heads, rounds, directions, -1)
            first, below = 0, 1
            for factor in factors:
                found = _farthest(rotated[:, :, :, first : first + factor // 2])
                buckets[..., some].add_(found, alpha=below)
                first, below = first + factor // 2, below * factor
    return buckets


def _farthest(rotated: Tensor) -> Tensor:
    """argmax over axis 3 of [rotated; -rotated], the first of equals. One direction at a time: torch's argmax over an
    axis that is not the last takes several times as long.
    """
    directions = rotated.unbind(3)
    best = directions[0].clone()
    found = torch.zeros_like(best, dtype=torch.int32)
    for number in range(1, 2 * len(directions)):
        here = directions[number] if number < len(directions) else -directions[number - len(directions)]
        found.masked_fill_(here > best, number)
        torch.maximum(best, here, out=best)
    return found


def mark_padding(
    buckets: Int[Tensor, "batch heads rounds length"], lengths: Int[Tensor, " batch"] | None, num_buckets: int
) -> Int[Tensor, "batch heads rounds length"]:
    """Positions at or beyond their row's length in a bucket of their own, the last: `num_buckets`."""
    if lengths is None:
        return buckets
    padded = torch.arange(buckets.shape[-1], device=buckets.device) >= lengths[:, None]
    return buckets.masked_fill(padded[:, None, None], num_buckets)


@dataclass(frozen=True)
class SortedPositions:
    """Each round's positions by bucket, and within a bucket by time, cut into chunks.

    Shape: order, buckets (*rows, chunks x chunk_len): the position that stands at a place of the sorted
        sequence, and its bucket; behind the real ones, positions from `length` on fill the last chunk. places (*rows,
        length): the inverse of order. All int64. Rows are batch, heads and rounds.
    """

    order: Tensor
    buckets: Tensor
    places: Tensor
    chunk_len: int

    @property
    def num_chunks(self) -> int:
        """A round's."""
        return self.order.shape[-1] // self.chunk_len


def sort_positions(buckets: Int[Tensor, "*rows length"], chunk_len: int) -> SortedPositions:
    """Positions by (bucket, position), in every round."""
    length = buckets.shape[-1]
    padded = -(-length // chunk_len) * chunk_len
    positions = torch.arange(length, device=buckets.device)
    # One number that sorts by bucket first and by time second, and from which both are read back.
    keys = torch.sort(buckets.long() * padded + positions, dim=-1).values
    if padded > length:
        filling = keys[..., -1:] // padded * padded + padded + torch.arange(length, padded, device=buckets.device)
        keys = torch.cat([keys, filling], dim=-1)
    order, in_order = keys % padded, keys // padded
    places = torch.empty_like(order).scatter_(-1, order, torch.arange(padded, device=keys.device).expand_as(order))
    return SortedPositions(order=order, buckets=in_order, places=places[..., :length], chunk_len=chunk_len)
