"""Attention by content and distance without the (batch, heads, q_len, k_len) weights in memory (decision 071).

Paper: Dai et al. 2019, sec. 3.3; tiles as in Dao 2023, arXiv:2307.08691. The formula is `kernels.relative`. Of its two
products, (q + v) . r is computed for all distances by torch. Row i must then move to the left by q_len - 1 - i columns:
the kernels read it, and write its gradient, at a row stride that is one less than its width. Nothing is added by
atomics, so the same inputs give the same bits.

In the kernels lanes are segments of packed rows: lane n has queries `q_starts[n]` to `q_starts[n + 1]`, and its keys
alike; without `q_starts` all lanes are equally long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.nn.kernels.modes import first_derivative_only


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, groups of 32 threads, and how many loads run ahead of the products."""

    queries: int
    keys: int
    warps: int
    stages: int


def tiles(kernel: Any, width: int, itemsize: int) -> Tiles:
    """Return a kernel's tiles for heads of this width, of numbers with so many bytes: always the same.

    They were compiled for sm_80 and sm_90 without spilled registers, with a mask and a bias. Larger ones spill, because
    of the addresses of the scores by distance. Shared memory: at most 68 KiB, of 163 KiB and 227 KiB.
    """
    if itemsize == 4:
        return Tiles(16, 16, 8, 1) if kernel is keys_kernel else Tiles(32, 32, 4, 1)
    if kernel is forward_kernel:
        return Tiles(64, 32 if width > 64 else 64, 8, 2)
    return Tiles(32 if kernel is keys_kernel and width > 64 else 64, 32, 8, 1)


@triton.jit
def _lane(q_starts, k_starts, q_len, k_len, lane, HAS_STARTS: tl.constexpr):
    """Return a lane's first query, number of queries, first key and number of keys."""
    if HAS_STARTS:
        first_query, first_key = tl.load(q_starts + lane), tl.load(k_starts + lane)
        queries = tl.load(q_starts + lane + 1) - first_query
        return first_query, queries, first_key, tl.load(k_starts + lane + 1) - first_key
    return lane * q_len, q_len, lane * k_len, k_len


@triton.jit
def _rows(x, first, head, row_stride, head_stride, rows, length, columns, WIDTH: tl.constexpr):
    """Load rows of one head, zeros beyond `length` and WIDTH. (rows, columns)"""
    at = x + first.to(tl.int64) * row_stride + head * head_stride
    inside = (rows < length)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(at + rows[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(x, values, first, head, heads, rows, length, columns, WIDTH: tl.constexpr):
    """Store rows of one head into a contiguous (tokens, heads, WIDTH) tensor."""
    at = x + (first.to(tl.int64) * heads + head) * WIDTH
    inside = (rows < length)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at + rows[:, None] * (heads * WIDTH) + columns[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _scores(
    q,
    k,
    rows,
    columns,
    q_len,
    k_len,
    by_distance,
    bias,
    allowed,
    width,
    first_distance,
    scale,
    mask_row_stride,
    mask_column_stride,
    CAUSAL: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the scores of a tile times log2(e), -inf where a query may not attend, and where it may.

    Args: by_distance, bias, allowed: of this lane and head. first_distance: the column of by_distance in which the
        first query has its first key; may be negative.
    """
    column = columns[None, :] - rows[:, None] + first_distance
    seen = (rows < q_len)[:, None] & (columns < k_len)[None, :]
    if CAUSAL:
        seen &= columns[None, :] <= rows[:, None] + (k_len - q_len)
    if HAS_STARTS:  # distances without a row of `positions`
        seen &= (column >= 0) & (column < width)
    if HAS_MASK:
        at = rows[:, None] * mask_row_stride + columns[None, :] * mask_column_stride
        seen &= tl.load(allowed + at, mask=seen, other=0) != 0
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    shifted = rows[:, None] * (width - 1) + columns[None, :] + first_distance
    scores += tl.load(by_distance + shifted, mask=seen, other=0.0).to(tl.float32)
    if HAS_BIAS:
        scores += tl.load(bias + column, mask=seen, other=0.0).to(tl.float32)
    return tl.where(seen, scores * (scale * 1.4426950408889634), -float("inf")), seen


@triton.jit
def forward_kernel(
    query, key, value, by_distance, bias, allowed, q_starts, k_starts, out, normalisers,
    q_row, q_head, k_row, k_head, v_row, v_head, mask_lane, mask_head, mask_row, mask_column,
    heads, tokens, q_len, k_len, width, longest, scale,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, HAS_STARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sum of values of a block of queries, and the base-2 logarithm of the sum of their exponentials."""
    lane, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # in causal attention the last blocks take longest
    first_query, q_len, first_key, k_len = _lane(q_starts, k_starts, q_len, k_len, lane, HAS_STARTS)
    if block * QUERIES >= q_len:
        return
    before = k_len - q_len
    rows, inner, outer = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    here = head.to(tl.int64) * tokens + first_query
    by_distance += here * width
    bias += head * width
    allowed += lane.to(tl.int64) * mask_lane + head * mask_head
    q = _rows(query, first_query, head, q_row, q_head, rows, q_len, inner, WIDTH)
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, BLOCK_VALUE], tl.float32)
    end = k_len
    if CAUSAL:
        end = tl.minimum(k_len, before + (block + 1) * QUERIES)
    for start in range(0, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        k = _rows(key, first_key, head, k_row, k_head, columns, k_len, inner, WIDTH)
        scores, _ = _scores(
            q, k, rows, columns, q_len, k_len, by_distance, bias, allowed, width, longest - before, scale,
            mask_row, mask_column, CAUSAL, HAS_STARTS, HAS_BIAS, HAS_MASK, PRECISION,
        )  # fmt: skip
        above = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(above == -float("inf"), 0.0, above)  # -inf - -inf would be NaN
        weights = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(highest - finite)
        total = total * fade + tl.sum(weights, 1)
        v = _rows(value, first_key, head, v_row, v_head, columns, k_len, outer, VALUE)
        summed = tl.dot(weights.to(v.dtype), v, summed * fade[:, None], input_precision=PRECISION)
        highest = above
    is_empty = total == 0.0
    summed = summed / tl.where(is_empty, 1.0, total)[:, None]
    _store_rows(out, summed, first_query, head, heads, rows, q_len, outer, VALUE)
    # A query that may attend to nothing has zeros, and weights of 2^-inf in the backward pass.
    normaliser = tl.where(is_empty, float("inf"), highest + tl.log2(total))
    tl.store(normalisers + here + rows, normaliser, mask=rows < q_len)


@triton.jit
def queries_kernel(
    query, key, value, by_distance, bias, allowed, q_starts, k_starts, out, normalisers, grad_out, deltas,
    grad_query, grad_by_distance,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, mask_lane, mask_head, mask_row, mask_column,
    heads, tokens, q_len, k_len, width, longest, scale,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, HAS_STARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of queries and of its scores by distance, and its sums of out x gradient."""
    lane, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_query, q_len, first_key, k_len = _lane(q_starts, k_starts, q_len, k_len, lane, HAS_STARTS)
    if block * QUERIES >= q_len:
        return
    before = k_len - q_len
    rows, inner, outer = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    here = head.to(tl.int64) * tokens + first_query
    by_distance += here * width
    grad_by_distance += here * width
    bias += head * width
    allowed += lane.to(tl.int64) * mask_lane + head * mask_head
    q = _rows(query, first_query, head, q_row, q_head, rows, q_len, inner, WIDTH)
    grad = _rows(grad_out, first_query, head, grad_row, grad_head, rows, q_len, outer, VALUE)
    result = _rows(out, first_query, head, heads * VALUE, VALUE, rows, q_len, outer, VALUE)
    delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(deltas + here + rows, delta, mask=rows < q_len)
    normaliser = tl.load(normalisers + here + rows, mask=rows < q_len, other=float("inf"))
    summed = tl.zeros([QUERIES, BLOCK_WIDTH], tl.float32)
    end = k_len
    if CAUSAL:
        end = tl.minimum(k_len, before + (block + 1) * QUERIES)
    for start in range(0, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        k = _rows(key, first_key, head, k_row, k_head, columns, k_len, inner, WIDTH)
        v = _rows(value, first_key, head, v_row, v_head, columns, k_len, outer, VALUE)
        scores, seen = _scores(
            q, k, rows, columns, q_len, k_len, by_distance, bias, allowed, width, longest - before, scale,
            mask_row, mask_column, CAUSAL, HAS_STARTS, HAS_BIAS, HAS_MASK, PRECISION,
        )  # fmt: skip
        weights = tl.exp2(scores - normaliser[:, None])
        grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta[:, None]) * scale
        shifted = rows[:, None] * (width - 1) + columns[None, :] + (longest - before)
        low = grad_scores.to(k.dtype)
        tl.store(grad_by_distance + shifted, low, mask=seen)
        summed = tl.dot(low, k, summed, input_precision=PRECISION)
    _store_rows(grad_query, summed, first_query, head, heads, rows, q_len, inner, WIDTH)


@triton.jit
def keys_kernel(
    query, key, value, by_distance, bias, allowed, q_starts, k_starts, normalisers, grad_out, deltas,
    grad_key, grad_value,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, mask_lane, mask_head, mask_row, mask_column,
    heads, tokens, q_len, k_len, width, longest, scale,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, HAS_STARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and their values."""
    lane, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    block = tl.program_id(1)
    first_query, q_len, first_key, k_len = _lane(q_starts, k_starts, q_len, k_len, lane, HAS_STARTS)
    if block * KEYS >= k_len:
        return
    before = k_len - q_len
    columns, inner, outer = block * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    here = head.to(tl.int64) * tokens + first_query
    by_distance += here * width
    bias += head * width
    allowed += lane.to(tl.int64) * mask_lane + head * mask_head
    k = _rows(key, first_key, head, k_row, k_head, columns, k_len, inner, WIDTH)
    v = _rows(value, first_key, head, v_row, v_head, columns, k_len, outer, VALUE)
    summed_key = tl.zeros([KEYS, BLOCK_WIDTH], tl.float32)
    summed_value = tl.zeros([KEYS, BLOCK_VALUE], tl.float32)
    begin = 0
    if CAUSAL:  # the first block with a query that sees the first of these keys
        begin = tl.maximum(0, block * KEYS - before) // QUERIES * QUERIES
    for start in range(begin, q_len, QUERIES):
        rows = start + tl.arange(0, QUERIES)
        q = _rows(query, first_query, head, q_row, q_head, rows, q_len, inner, WIDTH)
        grad = _rows(grad_out, first_query, head, grad_row, grad_head, rows, q_len, outer, VALUE)
        scores, _ = _scores(
            q, k, rows, columns, q_len, k_len, by_distance, bias, allowed, width, longest - before, scale,
            mask_row, mask_column, CAUSAL, HAS_STARTS, HAS_BIAS, HAS_MASK, PRECISION,
        )  # fmt: skip
        normaliser = tl.load(normalisers + here + rows, mask=rows < q_len, other=float("inf"))
        delta = tl.load(deltas + here + rows, mask=rows < q_len, other=0.0)
        weights = tl.exp2(scores - normaliser[:, None])
        summed_value = tl.dot(tl.trans(weights.to(grad.dtype)), grad, summed_value, input_precision=PRECISION)
        grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta[:, None]) * scale
        summed_key = tl.dot(tl.trans(grad_scores.to(q.dtype)), q, summed_key, input_precision=PRECISION)
    _store_rows(grad_key, summed_key, first_key, head, heads, columns, k_len, inner, WIDTH)
    _store_rows(grad_value, summed_value, first_key, head, heads, columns, k_len, outer, VALUE)


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
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        by_distance: Tensor,
        bias: Tensor | None,
        allowed: Tensor | None,
        lanes: Lanes,
    ) -> Tensor:
        tokens, heads, _ = query.shape
        out = query.new_zeros(tokens, heads, value.shape[-1])
        normalisers = torch.full((heads, tokens), math.inf, dtype=torch.float32, device=query.device)
        given = (query, key, value, by_distance, bias, allowed)
        _launch(forward_kernel, lanes, given, (out, normalisers))
        ctx.save_for_backward(query, key, value, by_distance, bias, allowed, out, normalisers)
        ctx.lanes = lanes
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, by_distance, bias, allowed, out, normalisers = ctx.saved_tensors
        lanes: Lanes = ctx.lanes
        grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
        deltas = torch.zeros_like(normalisers)
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value, by_distance)]
        given = (query, key, value, by_distance, bias, allowed)
        _launch(queries_kernel, lanes, given, (out, normalisers, grad_out, deltas, grads[0], grads[3]), grad_out)
        _launch(keys_kernel, lanes, given, (normalisers, grad_out, deltas, grads[1], grads[2]), grad_out)
        grad_bias = None if bias is None else grads[3].sum(1, dtype=torch.float32).to(bias.dtype)
        return (*grads, grad_bias, None, None)


def _launch(
    kernel: Any,
    lanes: Lanes,
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    more: tuple[Tensor, ...],
    grad_out: Tensor | None = None,
) -> None:
    """Run a kernel for every lane, head and block. Args: more: its tensors after those that all kernels have."""
    query, key, value, by_distance, bias, allowed = given
    tokens, heads, width = query.shape
    value_width = value.shape[-1]
    chosen = tiles(kernel, max(width, value_width), query.dtype.itemsize)
    blocks = (lanes.k_len, chosen.keys) if kernel is keys_kernel else (lanes.q_len, chosen.queries)
    strides = [stride for x in (query, key, value, grad_out) if x is not None for stride in x.stride()[:2]]
    mask = (query, 0, 0, 0, 0) if allowed is None else (allowed.view(torch.uint8), *allowed.stride())
    # What is not given is never read, so any tensor stands for it.
    others = [query if one is None else one for one in (bias, mask[0], lanes.q_starts, lanes.k_starts)]
    with torch.cuda.device_of(query):
        kernel[(lanes.count * heads, triton.cdiv(*blocks))](
            query,
            key,
            value,
            by_distance,
            *others,
            *more,
            *strides,
            *mask[1:],
            *(heads, tokens, lanes.q_len, lanes.k_len, by_distance.shape[-1], lanes.longest, 1 / math.sqrt(width)),
            WIDTH=width,
            VALUE=value_width,
            BLOCK_WIDTH=max(16, triton.next_power_of_2(width)),  # the smallest product of the GPU's units
            BLOCK_VALUE=max(16, triton.next_power_of_2(value_width)),
            QUERIES=chosen.queries,
            KEYS=chosen.keys,
            CAUSAL=lanes.causal,
            HAS_STARTS=lanes.q_starts is not None,
            HAS_BIAS=bias is not None,
            HAS_MASK=allowed is not None,
            PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
