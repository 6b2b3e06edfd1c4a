"""The parts that kernels of attention share: their tiles, rows of a head, and a softmax computed tile by tile.

Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691. Scores come multiplied by log2(e), and
normalisers are base-2 logarithms. A query that sees no key has the result 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, groups of 32 threads, and how many loads run ahead of the products."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Kind:
    """The constants of a kernel. width, value_width: numbers of a head, and padded. has_bias: numbers that
    distances have. For the others see `relative.Lanes` and `chunks.Layout`.
    """

    width: int
    value_width: int
    block_width: int
    block_value: int
    queries: int
    keys: int
    precision: str
    causal: bool
    has_bias: bool
    has_starts: bool = False
    has_mask: bool = False
    has_lengths: bool = False
    hashed: bool = False
    slides: bool = False
    in_bucket: bool = False
    wraps: bool = False
    keeps_scores: bool = False


def padded(width: int) -> int:
    """Return the size of a tile for this width; the smallest product of the GPU's units has 16."""
    return max(16, int(triton.next_power_of_2(width)))


def precision() -> str:
    """Return how float32 is multiplied: as torch multiplies it on this card, in TF32 only if the user allows it."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def launch(
    kernel: Any, programs: int, given: Sequence[Any], more: Sequence[Any], numbers: Sequence[Any], chosen: Tiles,
    **flags: bool,
) -> None:  # fmt: skip
    """Run a kernel, if there is anything to do. Args: given: query, key, value and others, of which some are None."""
    width, value = (int(x.shape[-1]) for x in (given[0], given[2]))
    sizes = (width, value, padded(width), padded(value), chosen.queries, chosen.keys)
    kind = Kind(*sizes, precision=precision(), **flags)
    # What is not given is never read, so any tensor stands for it.
    given, more = (tuple(given[0] if x is None else x for x in tensors) for tensors in (given, more))
    if programs:
        with torch.cuda.device_of(given[0]):
            kernel[(programs,)](given, *more, *numbers, KIND=kind, num_warps=chosen.warps, num_stages=chosen.stages)


@triton.jit
def wide(x):
    """Return a number with 64 bits: a product with it can exceed 2^31."""
    return tl.cast(x, tl.int64)


@triton.jit
def load_rows(x, at, row_stride, inside, columns, WIDTH: tl.constexpr):
    """Load rows `at` of x, zeros where they are not `inside`, and beyond WIDTH. (rows, columns)"""
    seen = inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + at[:, None] * row_stride + columns[None, :], mask=seen, other=0.0)


@triton.jit
def store_rows(x, values, at, row_stride, inside, columns, WIDTH: tl.constexpr):
    """Store rows `at` of x where they are `inside`."""
    seen = inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + at[:, None] * row_stride + columns[None, :], values.to(x.dtype.element_ty), mask=seen)


@triton.jit
def include(scores, highest, total):
    """Return the exponentials of a tile's scores, the factor of earlier sums, the new maximum, and the new total."""
    above = tl.maximum(highest, tl.max(scores, 1))
    finite = tl.where(above == -float("inf"), 0.0, above)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - finite[:, None])
    fade = tl.exp2(highest - finite)
    return weights, fade, above, total * fade + tl.sum(weights, 1)


@triton.jit
def finish(summed, highest, total, EMPTY: tl.constexpr):
    """Return means of values, and normalisers: EMPTY where nothing is seen; inf gives weights of 0 afterwards."""
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    return summed / total[:, None], tl.where(is_empty, EMPTY, highest + tl.log2(total))


@triton.jit
def errors_of(weights, grad, v, delta, KIND: tl.constexpr):
    """Return the loss's derivatives in the scores of a tile. Args: delta: each query's sum of result x gradient."""
    return weights * (tl.dot(grad, tl.trans(v), input_precision=KIND.precision) - delta[:, None])


@triton.jit
def add_queries(summed_key, summed_value, scores, normaliser, q, grad, v, delta, scale, KIND: tl.constexpr):
    """Add a tile's part of the gradients of a block of keys and values."""
    weights = tl.exp2(scores - normaliser[:, None])
    summed_value = tl.dot(tl.trans(weights.to(grad.dtype)), grad, summed_value, input_precision=KIND.precision)
    errors = errors_of(weights, grad, v, delta, KIND) * scale
    return tl.dot(tl.trans(errors.to(q.dtype)), q, summed_key, input_precision=KIND.precision), summed_value
