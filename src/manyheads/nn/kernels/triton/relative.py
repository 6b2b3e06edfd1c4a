"""Attention by content and distance without the (batch, heads, q_len, k_len) weights in memory (decision 071).

Paper: Dai et al. 2019, sec. 3.3; tiles as in Dao 2023, arXiv:2307.08691. The formula is `kernels.relative`. Of its two
products, (q + v) . r is computed for all distances by torch. Row i must then move to the left by q_len - 1 - i columns:
the kernels read it, and write its gradient, at a row stride that is one less than its width. Nothing is added by
atomics, so the same inputs give the same bits.

In the kernels lanes are segments of packed rows: lane n has queries `q_starts[n]` to `q_starts[n + 1]`, and its keys
alike; without `q_starts` all lanes are equally long. Addresses are those of a tile, with 64 bits, plus offsets in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.nn.kernels.modes import first_derivative_only
from manyheads.nn.kernels.triton.tiles import (
    Tiles,
    add_queries,
    errors_of,
    finish,
    include,
    launch,
    load_rows,
    store_rows,
    wide,
)


def tiles(kernel: Any, width: int, itemsize: int) -> Tiles:
    """Return a kernel's tiles for heads of this width, of numbers with so many bytes: always the same.

    They were compiled for sm_80 and sm_90 without spilled registers, with a mask and a bias. Larger ones spill, because
    of the addresses of the scores by distance. Shared memory: at most 68 KiB, of 163 KiB and 227 KiB.
    """
    if itemsize == 4:  # 32 x 32 by 128 threads spilled up to 892 bytes
        if kernel is keys_kernel:
            return Tiles(16, 16, 4 if width > 64 else 8, 1)
        return Tiles(32, 32, 8, 1) if width > 64 else Tiles(32, 16, 4, 1)
    if kernel is forward_kernel:
        return Tiles(64, 32 if width > 64 else 64, 8, 2)
    return Tiles(32 if width > 64 else 64, 32, 8, 1)


@triton.jit
def _lane(given, strides, sizes, KIND: tl.constexpr):
    """Return what this program's lane and head have: the tensors of rows; those of scores; the numbers of queries and
    keys; the first query and key of all lanes; where the numbers of the first query are; the head.
    """
    query, key, value, by_distance, bias, allowed, q_starts, k_starts = given
    lines, heads, tokens, q_len, k_len, width, longest, scale = sizes
    q_strides, k_strides, v_strides, _, mask_strides = strides
    lane, head = wide(tl.program_id(0) % lines // heads), wide(tl.program_id(0) % lines % heads)
    first_query, first_key = lane * q_len, lane * k_len
    if KIND.has_starts:
        first_query, first_key = wide(tl.load(q_starts + lane)), wide(tl.load(k_starts + lane))
        q_len = (tl.load(q_starts + lane + 1) - first_query).to(tl.int32)
        k_len = (tl.load(k_starts + lane + 1) - first_key).to(tl.int32)
    query += first_query * q_strides[0] + head * q_strides[1]
    key += first_key * k_strides[0] + head * k_strides[1]
    value += first_key * v_strides[0] + head * v_strides[1]
    here = head * tokens + first_query
    # The column of by_distance in which the first query has its first key; may be negative.
    first_distance = longest - (k_len - q_len)
    allowed += lane * mask_strides[0] + head * mask_strides[1]
    scores = (by_distance + here * width, bias + head * width, allowed, first_distance, width, scale)
    return (query, key, value), scores, (q_len, k_len), (first_query, first_key), here, head


@triton.jit
def _rows(x, first, row_stride, length, columns, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile's rows of one head, zeros beyond `length` and WIDTH. (SIZE, columns)"""
    at = tl.arange(0, SIZE)
    return load_rows(x + wide(first) * row_stride, at, row_stride, first + at < length, columns, WIDTH)


@triton.jit
def _store(x, values, token, head, heads, first, length, columns, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Store a tile's rows of one head into a contiguous (tokens, heads, WIDTH) tensor. Args: token: of all lanes."""
    at, x = tl.arange(0, SIZE), x + ((token + first) * heads + head) * WIDTH
    store_rows(x, values, at, heads * WIDTH, first + at < length, columns, WIDTH)


@triton.jit
def _addresses(x, first_row, first_column, row_stride, column_stride, KIND: tl.constexpr):
    """Return where the numbers of a tile are. (queries, keys)"""
    x += wide(first_row) * row_stride + wide(first_column) * column_stride
    return x + tl.arange(0, KIND.queries)[:, None] * row_stride + tl.arange(0, KIND.keys)[None, :] * column_stride


@triton.jit
def _scores(q, k, first_row, first_column, of_scores, lengths, mask_strides, KIND: tl.constexpr):
    """Return the scores of a tile times log2(e), -inf where a query may not attend, and where it may."""
    by_distance, bias, allowed, first_distance, width, scale = of_scores
    q_len, k_len = lengths
    rows, columns = first_row + tl.arange(0, KIND.queries), first_column + tl.arange(0, KIND.keys)
    column = columns[None, :] - rows[:, None] + first_distance
    seen = (rows < q_len)[:, None] & (columns < k_len)[None, :]
    if KIND.causal:
        seen &= columns[None, :] <= rows[:, None] + (k_len - q_len)
    if KIND.has_starts:  # distances without a row of `positions`
        seen &= (column >= 0) & (column < width)
    if KIND.has_mask:
        at = _addresses(allowed, first_row, first_column, mask_strides[2], mask_strides[3], KIND)
        seen &= tl.load(at, mask=seen, other=0) != 0
    scores = tl.dot(q, tl.trans(k), input_precision=KIND.precision)
    at = _addresses(by_distance + first_distance, first_row, first_column, width - 1, 1, KIND)
    scores += tl.load(at, mask=seen, other=0.0).to(tl.float32)
    if KIND.has_bias:
        scores += tl.load(bias + column, mask=seen, other=0.0).to(tl.float32)
    return tl.where(seen, scores * (scale * 1.4426950408889634), -float("inf")), seen


@triton.jit
def _end(first_row, lengths, KIND: tl.constexpr):
    """Return how many of the first keys a block of queries may see."""
    end = lengths[1]
    if KIND.causal:
        end = tl.minimum(end, end - lengths[0] + first_row + KIND.queries)
    return end


@triton.jit
def forward_kernel(given, out, normalisers, strides, sizes, KIND: tl.constexpr):
    """Write the sum of values of a block of queries, and the base-2 logarithm of the sum of their exponentials."""
    tensors, of_scores, lengths, first, here, head = _lane(given, strides, sizes, KIND)
    query, key, value = tensors
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // sizes[0]  # in causal attention the last take longest
    start, inner, outer = block * KIND.queries, tl.arange(0, KIND.block_width), tl.arange(0, KIND.block_value)
    if start >= lengths[0]:
        return
    q = _rows(query, start, strides[0][0], lengths[0], inner, KIND.queries, KIND.width)
    highest = tl.full([KIND.queries], -float("inf"), tl.float32)
    total = tl.full([KIND.queries], 0.0, tl.float32)
    summed = tl.full([KIND.queries, KIND.block_value], 0.0, tl.float32)
    for column in range(0, _end(start, lengths, KIND), KIND.keys):
        k = _rows(key, column, strides[1][0], lengths[1], inner, KIND.keys, KIND.width)
        scores, _ = _scores(q, k, start, column, of_scores, lengths, strides[4], KIND)
        weights, fade, highest, total = include(scores, highest, total)
        v = _rows(value, column, strides[2][0], lengths[1], outer, KIND.keys, KIND.value_width)
        summed = tl.dot(weights.to(v.dtype), v, summed * fade[:, None], input_precision=KIND.precision)
    summed, normaliser = finish(summed, highest, total, float("inf"))
    _store(out, summed, first[0], head, sizes[1], start, lengths[0], outer, KIND.queries, KIND.value_width)
    rows = start + tl.arange(0, KIND.queries)
    tl.store(normalisers + here + rows, normaliser, mask=rows < lengths[0])


@triton.jit
def queries_kernel(
    given, out, normalisers, grad_out, deltas, grad_query, grad_by_distance, strides, sizes, KIND: tl.constexpr
):
    """Write the gradients of a block of queries and of its scores by distance, and its sums of out x gradient."""
    tensors, of_scores, lengths, first, here, head = _lane(given, strides, sizes, KIND)
    query, key, value = tensors
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // sizes[0]
    start, inner, outer = block * KIND.queries, tl.arange(0, KIND.block_width), tl.arange(0, KIND.block_value)
    if start >= lengths[0]:
        return
    q = _rows(query, start, strides[0][0], lengths[0], inner, KIND.queries, KIND.width)
    grad_out += first[0] * strides[3][0] + head * strides[3][1]
    grad = _rows(grad_out, start, strides[3][0], lengths[0], outer, KIND.queries, KIND.value_width)
    out += (first[0] * sizes[1] + head) * KIND.value_width
    result = _rows(out, start, sizes[1] * KIND.value_width, lengths[0], outer, KIND.queries, KIND.value_width)
    delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    rows = start + tl.arange(0, KIND.queries)
    tl.store(deltas + here + rows, delta, mask=rows < lengths[0])
    normaliser = tl.load(normalisers + here + rows, mask=rows < lengths[0], other=float("inf"))
    summed = tl.full([KIND.queries, KIND.block_width], 0.0, tl.float32)
    _, _, _, first_distance, width, scale = of_scores
    grad_by_distance += here * width + first_distance
    for column in range(0, _end(start, lengths, KIND), KIND.keys):
        k = _rows(key, column, strides[1][0], lengths[1], inner, KIND.keys, KIND.width)
        v = _rows(value, column, strides[2][0], lengths[1], outer, KIND.keys, KIND.value_width)
        scores, seen = _scores(q, k, start, column, of_scores, lengths, strides[4], KIND)
        weights = tl.exp2(scores - normaliser[:, None])
        low = (errors_of(weights, grad, v, delta, KIND) * scale).to(k.dtype)
        tl.store(_addresses(grad_by_distance, start, column, width - 1, 1, KIND), low, mask=seen)
        summed = tl.dot(low, k, summed, input_precision=KIND.precision)
    _store(grad_query, summed, first[0], head, sizes[1], start, lengths[0], inner, KIND.queries, KIND.width)


@triton.jit
def keys_kernel(given, normalisers, grad_out, deltas, grad_key, grad_value, strides, sizes, KIND: tl.constexpr):
    """Write the gradients of a block of keys and their values."""
    tensors, of_scores, lengths, first, here, head = _lane(given, strides, sizes, KIND)
    query, key, value = tensors
    block = tl.program_id(0) // sizes[0]
    start, inner, outer = block * KIND.keys, tl.arange(0, KIND.block_width), tl.arange(0, KIND.block_value)
    if start >= lengths[1]:
        return
    k = _rows(key, start, strides[1][0], lengths[1], inner, KIND.keys, KIND.width)
    v = _rows(value, start, strides[2][0], lengths[1], outer, KIND.keys, KIND.value_width)
    grad_out += first[0] * strides[3][0] + head * strides[3][1]
    summed_key = tl.full([KIND.keys, KIND.block_width], 0.0, tl.float32)
    summed_value = tl.full([KIND.keys, KIND.block_value], 0.0, tl.float32)
    begin = 0
    if KIND.causal:  # the first block with a query that sees the first of these keys
        begin = tl.maximum(0, start - (lengths[1] - lengths[0])) // KIND.queries * KIND.queries
    for row in range(begin, lengths[0], KIND.queries):
        q = _rows(query, row, strides[0][0], lengths[0], inner, KIND.queries, KIND.width)
        grad = _rows(grad_out, row, strides[3][0], lengths[0], outer, KIND.queries, KIND.value_width)
        scores, _ = _scores(q, k, row, start, of_scores, lengths, strides[4], KIND)
        rows = row + tl.arange(0, KIND.queries)
        normaliser = tl.load(normalisers + here + rows, mask=rows < lengths[0], other=float("inf"))
        delta = tl.load(deltas + here + rows, mask=rows < lengths[0], other=0.0)
        summed_key, summed_value = add_queries(
            summed_key, summed_value, scores, normaliser, q, grad, v, delta, of_scores[5], KIND
        )
    _store(grad_key, summed_key, first[1], head, sizes[1], start, lengths[1], inner, KIND.keys, KIND.width)
    _store(grad_value, summed_value, first[1], head, sizes[1], start, lengths[1], outer, KIND.keys, KIND.value_width)


@dataclass(frozen=True)
class Lanes:
    """The lanes of packed queries and keys. longest: the distance of the first row of `positions`."""

    count: int
    q_len: int
    k_len: int
    longest: int
    causal: bool
    q_starts: Tensor | None = None
    k_starts: Tensor | None = None


@first_derivative_only
class FusedAttention(torch.autograd.Function):
    """Sums of values of packed rows: query (q_tokens, heads, width), key and value (k_tokens, heads, width)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, by_distance: Tensor, bias: Tensor | None,
        allowed: Tensor | None, lanes: Lanes,
    ) -> Tensor:  # fmt: skip
        tokens, heads, _ = query.shape
        out = query.new_zeros(tokens, heads, value.shape[-1])
        normalisers = torch.full((heads, tokens), math.inf, dtype=torch.float32, device=query.device)
        given = (query, key, value, by_distance, bias, allowed)
        _launch(forward_kernel, lanes, given, (out, normalisers), query)
        ctx.save_for_backward(*given, out, normalisers)
        ctx.lanes = lanes
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, normalisers = ctx.saved_tensors
        grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
        deltas = torch.zeros_like(normalisers)
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in given[:4]]
        more = (out, normalisers, grad_out, deltas, grads[0], grads[3])
        _launch(queries_kernel, ctx.lanes, given, more, grad_out)
        _launch(keys_kernel, ctx.lanes, given, (normalisers, grad_out, deltas, grads[1], grads[2]), grad_out)
        bias = given[4]
        grad_bias = None if bias is None else grads[3].sum(1, dtype=torch.float32).to(bias.dtype)
        return (*grads, grad_bias, None, None)


def _launch(kernel: Any, lanes: Lanes, given: Sequence[Any], more: tuple[Tensor, ...], grad_out: Tensor) -> None:
    """Run a kernel for every lane, head and block.

    Args: given: the tensors of `FusedAttention`. more: the kernel's tensors after these. grad_out: read if it is one.
    """
    query, key, value, by_distance, bias, allowed = given
    tokens, heads, width = query.shape
    chosen = tiles(kernel, max(width, value.shape[-1]), query.dtype.itemsize)
    blocks = (lanes.k_len, chosen.keys) if kernel is keys_kernel else (lanes.q_len, chosen.queries)
    lines = lanes.count * heads
    strides = [x.stride()[:2] for x in (query, key, value, grad_out)]
    mask = None if allowed is None else allowed.view(torch.uint8)
    starts = [None if x is None else x.contiguous() for x in (lanes.q_starts, lanes.k_starts)]
    sizes = (lines, heads, tokens, lanes.q_len, lanes.k_len, by_distance.shape[-1], lanes.longest, 1 / math.sqrt(width))
    launch(
        kernel, lines * triton.cdiv(*blocks), (query, key, value, by_distance, bias, mask, *starts), more,
        ((*strides, (0, 0, 0, 0) if mask is None else mask.stride()), sizes), chosen, causal=lanes.causal,
        has_starts=lanes.q_starts is not None, has_bias=bias is not None, has_mask=mask is not None,
    )  # fmt: skip
