"""Hashing and sorting for hashed attention: the buckets of all vectors, and the order of positions (decision 074).

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2. The formulas are `hash_vectors` and `sorting_order`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.nn.kernels.triton.chunks import by_length, load_of_head
from manyheads.nn.kernels.triton.tiles import precision, wide

POSITIONS, DIRECTIONS, COLUMNS, SLOTS = 32, 16, 32, 1024
"""Positions, directions and numbers of a vector of which a program computes products at once: with the 128 numbers of
the widest head it spilled registers. SLOTS: of which a program finds the positions."""


@triton.jit
def _first_maximum(values, columns, count, highest, found):
    """Return each row's maximum of `values` and `highest`, and the first column that has it."""
    values = tl.where((columns < count)[None, :], values, -float("inf"))
    here = tl.max(values, 1)
    column = tl.min(tl.where(values == here[:, None], columns[None, :], count - 1), 1)
    return tl.maximum(here, highest), tl.where(here > highest, column, found)


@triton.jit
def hash_kernel(
    vectors, rotations, lengths, keys, heads, rounds, length, slots, directions, num_buckets,
    FACTORS: tl.constexpr, WIDTH: tl.constexpr, POSITIONS: tl.constexpr, DIRECTIONS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_LENGTHS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write bucket x slots + position for each row, round and slot; padding and free slots have two more buckets."""
    blocks = tl.cdiv(slots, POSITIONS)
    at = tl.program_id(0) % blocks * POSITIONS + tl.arange(0, POSITIONS)
    line = tl.program_id(0) // blocks
    turn, batch, head = line % rounds, line // rounds // heads, line // rounds % heads
    real = length
    if HAS_LENGTHS:
        real = tl.load(lengths + batch).to(tl.int32)
    hashed = tl.where(at < real, at, -1)
    vectors += (wide(batch) * length * heads + head) * WIDTH
    rotations += (wide(head) * WIDTH * rounds + turn) * directions
    bucket = tl.zeros([POSITIONS], tl.int64)
    first = 0
    below = 1
    for factor in tl.static_range(len(FACTORS)):
        count = FACTORS[factor] // 2
        highest = tl.full([POSITIONS], -float("inf"), tl.float32)
        opposite = tl.full([POSITIONS], -float("inf"), tl.float32)
        found = tl.zeros([POSITIONS], tl.int32)
        found_opposite = tl.zeros([POSITIONS], tl.int32)
        for start in range(0, count, DIRECTIONS):
            columns = start + tl.arange(0, DIRECTIONS)
            rotated = tl.zeros([POSITIONS, DIRECTIONS], tl.float32)
            for begin in range(0, WIDTH, COLUMNS):
                inner = begin + tl.arange(0, COLUMNS)
                x = load_of_head(vectors, hashed, heads, inner, WIDTH).to(tl.float32)
                across = inner[:, None] * (rounds * directions) + first + columns[None, :]
                inside = (inner < WIDTH)[:, None] & (columns < count)[None, :]
                directed = tl.load(rotations + across, mask=inside, other=0.0)
                rotated = tl.dot(x, directed, rotated, input_precision=PRECISION)
            highest, found = _first_maximum(rotated, columns, count, highest, found)
            opposite, found_opposite = _first_maximum(-rotated, columns, count, opposite, found_opposite)
        bucket += wide(tl.where(opposite > highest, found_opposite + count, found)) * below
        first += count
        below *= 2 * count
    bucket = tl.where(at < real, bucket, tl.where(at < length, num_buckets, num_buckets + 1))
    key = (bucket * slots + at).to(keys.dtype.element_ty)
    tl.store(keys + line.to(tl.int64) * slots + at, key, mask=at < slots)


@triton.jit
def order_kernel(keys, order, slots, SLOTS: tl.constexpr):
    """Write 2 x position for each sorted key, plus 1 if its bucket is not that of the key before."""
    blocks = tl.cdiv(slots, SLOTS)
    slot = tl.program_id(0) % blocks * SLOTS + tl.arange(0, SLOTS)
    at = (tl.program_id(0) // blocks).to(tl.int64) * slots + slot
    key = tl.load(keys + at, mask=slot < slots, other=0)
    before = tl.load(keys + at - 1, mask=(slot > 0) & (slot < slots), other=0)
    changes = (slot > 0) & (key // slots != before // slots)
    tl.store(order + at, (2 * (key % slots) + changes).to(tl.int32), mask=slot < slots)


def fused_order(
    qk: Tensor, rotations: Tensor, factors: tuple[int, ...], chunk_len: int, lengths: Tensor | None
) -> Tensor:
    """Do the same as `kernels.lsh.hashed_order`."""
    batch, heads, length, width = qk.shape
    rounds, slots, num_buckets = rotations.shape[2], -(-length // chunk_len) * chunk_len, math.prod(factors)
    fits = (num_buckets + 2) * slots <= torch.iinfo(torch.int32).max
    keys = qk.new_empty(batch, heads, rounds, slots, dtype=torch.int32 if fits else torch.int64)
    order, lines = torch.empty_like(keys, dtype=torch.int32), batch * heads * rounds
    if keys.numel():
        vectors, across = by_length(qk.detach()), rotations.float().contiguous()
        with torch.cuda.device_of(qk):
            hash_kernel[(lines * triton.cdiv(slots, POSITIONS),)](
                vectors, across, vectors if lengths is None else lengths.contiguous(), keys,
                heads, rounds, length, slots, across.shape[3], num_buckets,
                FACTORS=factors, WIDTH=width, POSITIONS=POSITIONS, DIRECTIONS=DIRECTIONS, COLUMNS=COLUMNS,
                HAS_LENGTHS=lengths is not None, PRECISION=precision(), num_warps=4, num_stages=1,
            )  # fmt: skip
            order_kernel[(lines * triton.cdiv(slots, SLOTS),)](keys.sort(dim=-1).values, order, slots, SLOTS=SLOTS)
    return order
