"""Hashed and local attention chunk by chunk, without scores in memory (decision 074).

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2; tiles as in Dao 2023, arXiv:2307.08691. The formulas are
`kernels.lsh` and `attention.local`. A program has a block of neighbouring slots of the sorted order and gathers its
rows, and those of the slots around it, by their positions; local attention has no order, so a slot is a position. It
writes to the positions, a part for each round, so nothing is added by atomics and the same inputs give the same bits.

In the kernels a row is one head of one row of the batch. Its slots form rings, one for each round, or one in all with
`look_across_rounds`. A ring consists of units, whose queries see the same slots: so many before and after the unit.
Tensors are (batch, length, heads, width) and contiguous; parts of rounds (batch, rounds, length, heads, width).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from manyheads.nn.attention.lsh_settings import LSHSettings
from manyheads.nn.kernels.modes import first_derivative_only
from manyheads.nn.kernels.triton.relative import Tiles

POSITIONS = 32
"""Positions of which a program combines the rounds."""


def tiles(kernel: Any, width: int, itemsize: int, hashed: bool) -> Tiles:
    """Return a kernel's tiles for heads of this width, of numbers with so many bytes: always the same.

    They were compiled for sm_80 and sm_90 without spilled registers. Shared memory: at most 56 KiB.
    """
    if itemsize == 4:  # where the other number of threads spilled 4 bytes on sm_80
        return Tiles(16, 16, 4 if kernel is keys_kernel and (hashed or width <= 64) else 8, 1)
    if kernel is forward_kernel:
        return Tiles(64, 64 if width <= 64 else 32, 8, 1)
    return Tiles(32, 32, 4, 1) if kernel is keys_kernel else Tiles(64, 32, 8, 1)


@triton.jit
def load_rows(x, batch, head, heads, length, at, columns, WIDTH: tl.constexpr):
    """Load rows of one head; zeros where the position `at` is negative, and beyond WIDTH. (positions, columns)"""
    x += (batch.to(tl.int64) * length * heads + head) * WIDTH
    inside = (at >= 0)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + at.to(tl.int64)[:, None] * (heads * WIDTH) + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(x, values, batch, head, heads, length, at, columns, WIDTH: tl.constexpr):
    """Store rows of one head at positions that are not negative."""
    x += (batch.to(tl.int64) * length * heads + head) * WIDTH
    inside = (at >= 0)[:, None] & (columns < WIDTH)[None, :]
    at = at.to(tl.int64)[:, None] * (heads * WIDTH) + columns[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _block(lengths, heads, length, rounds, slots, ring, unit, HAS_LENGTHS: tl.constexpr, SIZE: tl.constexpr):
    """Return this program's row of the batch and head, how many positions are real, the first slot of its ring, and
    within the ring the first slots of its block and of its unit.
    """
    each = tl.cdiv(unit, SIZE)
    blocks, rings = ring // unit * each, rounds * slots // ring
    block, line = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = line // rings // heads, line // rings % heads
    real = length
    if HAS_LENGTHS:
        real = tl.load(lengths + batch).to(tl.int32)
    first = block // each * unit
    return batch, head, real, line % rings * ring, first + block % each * SIZE, first


@triton.jit
def _window(first, low, ring, unit, before, after, SIZE: tl.constexpr, SLIDES: tl.constexpr, WRAPS: tl.constexpr):
    """Return where the slots begin and end that are around a block, or around its unit, which begins at `low`."""
    begin, end = low - before, low + unit + after
    if SLIDES:
        begin, end = first - before, first + SIZE + after
    if not WRAPS:
        begin, end = tl.maximum(begin, 0), tl.minimum(end, ring)
    return begin, end


@triton.jit
def _positions(
    order, buckets, slots, end, ring, real, HASHED: tl.constexpr, IN_BUCKET: tl.constexpr, WRAPS: tl.constexpr
):
    """Return the positions of slots, the same with -1 for padding, and the buckets."""
    inside = slots < end
    if WRAPS:
        slots = (slots % ring + ring) % ring
    at, bucket = slots, slots
    if HASHED:
        at = tl.load(order + slots, mask=inside, other=-2) >> 1
    if IN_BUCKET:
        bucket = tl.load(buckets + slots, mask=inside, other=0)
    return at, tl.where(inside & (at < real), at, -1), bucket


@triton.jit
def _unit_length(rows, key_eps):
    """Return rows with length 1, in their dtype, and the factor of each. Args: key_eps: added to the sum of squares."""
    wide = rows.to(tl.float32)
    squares = tl.sum(wide * wide, 1) + key_eps
    factors = tl.where(squares > 0.0, tl.rsqrt(tl.where(squares > 0.0, squares, 1.0)), 0.0)  # 0 x inf would be NaN
    return (wide * factors[:, None]).to(rows.dtype), factors


@triton.jit
def _scores(
    q, k, q_slots, q_at, q_bucket, k_slots, k_at, k_bucket, penalties, distances, before, scale,
    HASHED: tl.constexpr, CAUSAL: tl.constexpr, SLIDES: tl.constexpr, IN_BUCKET: tl.constexpr,
    HAS_PENALTIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile times log2(e), -inf where a query does not see a key, and where it does.

    Args: q_slots, k_slots: they do not begin again where a ring ends. penalties: of this head.
    """
    seen = (q_at >= 0)[:, None] & (k_at >= 0)[None, :]
    behind = q_slots[:, None] - k_slots[None, :]
    if SLIDES:  # in a bucket the slots are in order of position
        seen &= (behind > 0) & (behind <= before)
    elif CAUSAL and HASHED:
        seen &= k_at[None, :] < q_at[:, None]
    elif CAUSAL:
        seen &= k_at[None, :] <= q_at[:, None]
    elif HASHED:
        seen &= k_at[None, :] != q_at[:, None]
    if IN_BUCKET:
        seen &= q_bucket[:, None] == k_bucket[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
    if HAS_PENALTIES:
        at = tl.minimum(tl.abs(behind), distances - 1)
        scores -= tl.load(penalties + at, mask=seen, other=0.0).to(tl.float32) * 1.4426950408889634
    return tl.where(seen, scores, -float("inf")), seen


@triton.jit
def forward_kernel(
    query, key, value, order, buckets, lengths, penalties, out, normalisers,
    heads, length, rounds, slots, ring, unit, before, after, distances, scale, key_eps,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HASHED: tl.constexpr, CAUSAL: tl.constexpr, SLIDES: tl.constexpr,
    IN_BUCKET: tl.constexpr, WRAPS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_PENALTIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sum of values of a block of queries, and the base-2 logarithm of the sum of their exponentials."""
    batch, head, real, ring_first, first, unit_first = _block(
        lengths, heads, length, rounds, slots, ring, unit, HAS_LENGTHS, QUERIES
    )
    inner, outer = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    in_order = (batch.to(tl.int64) * heads + head) * rounds * slots + ring_first
    order, buckets, penalties = order + in_order, buckets + in_order, penalties + head * distances
    block = first + tl.arange(0, QUERIES)
    given, q_at, q_bucket = _positions(order, buckets, block, unit_first + unit, ring, real, HASHED, IN_BUCKET, False)
    q = load_rows(query, batch, head, heads, length, q_at, inner, WIDTH)
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, BLOCK_VALUE], tl.float32)
    begin, end = _window(first, unit_first, ring, unit, before, after, QUERIES, SLIDES, WRAPS)
    if CAUSAL and not HASHED and not WRAPS:
        end = tl.minimum(end, first + QUERIES)
    for start in range(begin, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        _, k_at, k_bucket = _positions(order, buckets, columns, end, ring, real, HASHED, IN_BUCKET, WRAPS)
        k = load_rows(key, batch, head, heads, length, k_at, inner, WIDTH)
        if HASHED:
            k, _ = _unit_length(k, key_eps)
        scores, _ = _scores(
            q, k, block, q_at, q_bucket, columns, k_at, k_bucket, penalties, distances, before, scale,
            HASHED, CAUSAL, SLIDES, IN_BUCKET, HAS_PENALTIES, PRECISION,
        )  # fmt: skip
        above = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(above == -float("inf"), 0.0, above)  # -inf - -inf would be NaN
        weights = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(highest - finite)
        total = total * fade + tl.sum(weights, 1)
        v = load_rows(value, batch, head, heads, length, k_at, outer, VALUE)
        summed = tl.dot(weights.to(v.dtype), v, summed * fade[:, None], input_precision=PRECISION)
        highest = above
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    line = batch * rounds + (ring_first + first) // slots
    given = tl.where((block < unit_first + unit) & (given < length), given, -1)
    _store_rows(out, summed / total[:, None], line, head, heads, length, given, outer, VALUE)
    # A query that sees nothing has the sum 0 in a round, and in the end weights of 2^-inf in the backward pass.
    nothing = -float("inf") if HASHED else float("inf")
    normaliser = tl.where(is_empty, nothing, highest + tl.log2(total))
    _store_rows(normalisers, normaliser[:, None], line, head, heads, length, given, tl.arange(0, 1), 1)


@triton.jit
def combine_kernel(
    parts, part_normalisers, value, lengths, out, normalisers, heads, length, rounds,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, SIZE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Write the result of all rounds: a query's own value if it sees no key in any, and zeros at padding."""
    blocks = tl.cdiv(length, SIZE)
    row, at = tl.program_id(0) // blocks, tl.program_id(0) % blocks * SIZE + tl.arange(0, SIZE)
    batch, head = row // heads, row % heads
    at = tl.where(at < length, at, -1)
    real = length
    if HAS_LENGTHS:
        real = tl.load(lengths + batch).to(tl.int32)
    shown = tl.where(at < real, at, -1)
    one, outer = tl.arange(0, 1), tl.arange(0, BLOCK_VALUE)
    highest = tl.full([SIZE, 1], -float("inf"), tl.float32)
    total = tl.zeros([SIZE, 1], tl.float32)
    summed = tl.zeros([SIZE, BLOCK_VALUE], tl.float32)
    for turn in range(0, rounds):
        line = batch * rounds + turn
        here = load_rows(part_normalisers, line, head, heads, length, shown, one, 1)
        here = tl.where((shown >= 0)[:, None], here, -float("inf"))
        above = tl.maximum(highest, here)
        finite = tl.where(above == -float("inf"), 0.0, above)
        weight, fade = tl.exp2(here - finite), tl.exp2(highest - finite)
        total = total * fade + weight
        part = load_rows(parts, line, head, heads, length, shown, outer, VALUE)
        summed = summed * fade + part.to(tl.float32) * weight
        highest = above
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    own = load_rows(value, batch, head, heads, length, shown, outer, VALUE).to(tl.float32)
    _store_rows(out, tl.where(is_empty, own, summed / total), batch, head, heads, length, at, outer, VALUE)
    normaliser = tl.where(is_empty, float("inf"), highest + tl.log2(total))
    _store_rows(normalisers, normaliser, batch, head, heads, length, at, one, 1)


@triton.jit
def queries_kernel(
    query, key, value, order, buckets, lengths, penalties, out, normalisers, grad_out, deltas, grad_query, grad_scores,
    heads, length, rounds, slots, ring, unit, before, after, distances, scale, key_eps,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HASHED: tl.constexpr, CAUSAL: tl.constexpr, SLIDES: tl.constexpr,
    IN_BUCKET: tl.constexpr, WRAPS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_PENALTIES: tl.constexpr,
    PRECISION: tl.constexpr, KEEPS_SCORES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of queries, and its sums of out x gradient; if asked, the gradients of scores."""
    batch, head, real, ring_first, first, unit_first = _block(
        lengths, heads, length, rounds, slots, ring, unit, HAS_LENGTHS, QUERIES
    )
    inner, outer = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    in_order = (batch.to(tl.int64) * heads + head) * rounds * slots + ring_first
    order, buckets, penalties = order + in_order, buckets + in_order, penalties + head * distances
    block = first + tl.arange(0, QUERIES)
    given, q_at, q_bucket = _positions(order, buckets, block, unit_first + unit, ring, real, HASHED, IN_BUCKET, False)
    q = load_rows(query, batch, head, heads, length, q_at, inner, WIDTH)
    grad = load_rows(grad_out, batch, head, heads, length, q_at, outer, VALUE)
    result = load_rows(out, batch, head, heads, length, q_at, outer, VALUE)
    delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    turn = (ring_first + first) // slots
    here = (batch.to(tl.int64) * length + q_at) * heads + head
    tl.store(deltas + here, delta, mask=(q_at >= 0) & (turn == 0))  # a round has every position
    normaliser = tl.load(normalisers + here, mask=q_at >= 0, other=float("inf"))
    summed = tl.zeros([QUERIES, BLOCK_WIDTH], tl.float32)
    begin, end = _window(first, unit_first, ring, unit, before, after, QUERIES, SLIDES, WRAPS)
    if CAUSAL and not HASHED and not WRAPS:
        end = tl.minimum(end, first + QUERIES)
    for start in range(begin, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        _, k_at, k_bucket = _positions(order, buckets, columns, end, ring, real, HASHED, IN_BUCKET, WRAPS)
        k = load_rows(key, batch, head, heads, length, k_at, inner, WIDTH)
        if HASHED:
            k, _ = _unit_length(k, key_eps)
        v = load_rows(value, batch, head, heads, length, k_at, outer, VALUE)
        scores, seen = _scores(
            q, k, block, q_at, q_bucket, columns, k_at, k_bucket, penalties, distances, before, scale,
            HASHED, CAUSAL, SLIDES, IN_BUCKET, HAS_PENALTIES, PRECISION,
        )  # fmt: skip
        weights = tl.exp2(scores - normaliser[:, None])
        errors = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if KEEPS_SCORES:
            across = ((batch.to(tl.int64) * heads + head) * slots + block) * (before + unit + after)
            at = across[:, None] + (columns - unit_first + before)[None, :]
            tl.store(grad_scores + at, errors.to(grad_scores.dtype.element_ty), mask=seen)
        summed = tl.dot((errors * scale).to(k.dtype), k, summed, input_precision=PRECISION)
    given = tl.where((block < unit_first + unit) & (given < length), given, -1)
    _store_rows(grad_query, summed, batch * rounds + turn, head, heads, length, given, inner, WIDTH)


@triton.jit
def keys_kernel(
    query, key, value, order, buckets, lengths, penalties, normalisers, grad_out, deltas, grad_key, grad_value,
    heads, length, rounds, slots, ring, unit, before, after, distances, scale, key_eps,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HASHED: tl.constexpr, CAUSAL: tl.constexpr, SLIDES: tl.constexpr,
    IN_BUCKET: tl.constexpr, WRAPS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_PENALTIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and their values; hashed keys add theirs to that of the same queries."""
    batch, head, real, ring_first, first, unit_first = _block(
        lengths, heads, length, rounds, slots, ring, unit, HAS_LENGTHS, KEYS
    )
    inner, outer = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    in_order = (batch.to(tl.int64) * heads + head) * rounds * slots + ring_first
    order, buckets, penalties = order + in_order, buckets + in_order, penalties + head * distances
    of_head = batch.to(tl.int64) * length * heads + head
    normalisers, deltas = normalisers + of_head, deltas + of_head
    block = first + tl.arange(0, KEYS)
    given, k_at, k_bucket = _positions(order, buckets, block, unit_first + unit, ring, real, HASHED, IN_BUCKET, False)
    k = load_rows(key, batch, head, heads, length, k_at, inner, WIDTH)
    if HASHED:
        k, factors = _unit_length(k, key_eps)
    v = load_rows(value, batch, head, heads, length, k_at, outer, VALUE)
    summed_key = tl.zeros([KEYS, BLOCK_WIDTH], tl.float32)
    summed_value = tl.zeros([KEYS, BLOCK_VALUE], tl.float32)
    begin, end = _window(first, unit_first, ring, unit, after, before, KEYS, SLIDES, WRAPS)
    if CAUSAL and not HASHED and not WRAPS:
        begin = tl.maximum(begin, first)
    for start in range(begin, end, QUERIES):
        rows = start + tl.arange(0, QUERIES)
        _, q_at, q_bucket = _positions(order, buckets, rows, end, ring, real, HASHED, IN_BUCKET, WRAPS)
        q = load_rows(query, batch, head, heads, length, q_at, inner, WIDTH)
        grad = load_rows(grad_out, batch, head, heads, length, q_at, outer, VALUE)
        scores, _ = _scores(
            q, k, rows, q_at, q_bucket, block, k_at, k_bucket, penalties, distances, before, scale,
            HASHED, CAUSAL, SLIDES, IN_BUCKET, HAS_PENALTIES, PRECISION,
        )  # fmt: skip
        normaliser = tl.load(normalisers + q_at * heads, mask=q_at >= 0, other=float("inf"))
        delta = tl.load(deltas + q_at * heads, mask=q_at >= 0, other=0.0)
        weights = tl.exp2(scores - normaliser[:, None])
        summed_value = tl.dot(tl.trans(weights.to(grad.dtype)), grad, summed_value, input_precision=PRECISION)
        errors = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None]) * scale
        summed_key = tl.dot(tl.trans(errors.to(q.dtype)), q, summed_key, input_precision=PRECISION)
    turn = (ring_first + first) // slots
    line = batch * rounds + turn
    given = tl.where((block < unit_first + unit) & (given < length), given, -1)
    if HASHED:
        # k = f q with f = 1 / sqrt(q.q + eps), so the component along q is removed.
        wide = load_rows(key, batch, head, heads, length, k_at, inner, WIDTH).to(tl.float32)
        along = tl.sum(wide * summed_key, 1) * factors * factors
        summed_key = (summed_key - wide * along[:, None]) * factors[:, None]
        summed_key += load_rows(grad_key, line, head, heads, length, given, inner, WIDTH).to(tl.float32)
        is_alone = tl.load(normalisers + k_at * heads, mask=(k_at >= 0) & (turn == 0), other=0.0) == float("inf")
        own = load_rows(grad_out, batch, head, heads, length, tl.where(is_alone, k_at, -1), outer, VALUE)
        summed_value += own.to(tl.float32)
    _store_rows(grad_key, summed_key, line, head, heads, length, given, inner, WIDTH)
    _store_rows(grad_value, summed_value, line, head, heads, length, given, outer, VALUE)


@dataclass(frozen=True)
class Layout:
    """Which slots a query sees; `ring`, `unit`, `before` and `after` as in the module's first lines.

    slides: a query sees the `before` slots before its own, of its bucket. eps: added to a key's mean square.
    """

    slots: int
    ring: int
    unit: int
    before: int
    after: int
    causal: bool
    wraps: bool
    scale: float
    rounds: int = 1
    hashed: bool = False
    slides: bool = False
    in_bucket: bool = False
    eps: float = 0.0


def fused_local_attention(
    query: Tensor, key: Tensor, value: Tensor, penalties: Tensor | None, lengths: Tensor | None, chunk_len: int,
    chunks_before: int, chunks_after: int, causal: bool, wrap: bool,
) -> Tensor:  # fmt: skip
    """Do the same as `local_attention`, whose rule for short sequences has been applied."""
    slots = -(-query.shape[2] // chunk_len) * chunk_len
    before, after = chunks_before * chunk_len, chunks_after * chunk_len
    layout = Layout(slots, slots, chunk_len, before, after, causal, wrap, 1 / math.sqrt(query.shape[-1]))
    key, value = key.to(query.dtype), value.to(query.dtype)
    out: Tensor = _Attention.apply(query, key, value, penalties, None, lengths, layout, ())[0]
    return out


def fused_lsh_attention(
    qk: Tensor, v: Tensor, order: Tensor, settings: LSHSettings, lengths: Tensor | None, known: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Do the same as `chunked_attention`."""
    rounds, slots = order.shape[2:]
    chunk_len, slides = settings.chunk_len, settings.visible == "bucket"
    ring = slots * (rounds if settings.look_across_rounds else 1)
    layout = Layout(
        slots, ring, max(1, ring) if slides else chunk_len, settings.chunks_before * chunk_len,
        settings.chunks_after * chunk_len, settings.causal, settings.wrap, settings.scale, rounds, True, slides,
        slides or settings.within_bucket, settings.key_eps,
    )  # fmt: skip
    out, normalisers = _Attention.apply(qk, None, v.to(qk.dtype), None, order, lengths, layout, known)
    return out, (out.detach(), normalisers)


@first_derivative_only
class _Attention(torch.autograd.Function):
    """Sums of values, (batch, heads, length, width), and for each position the logarithm to the base 2 of its sum of
    exp(score), (batch, length, heads). Without a key the queries are the keys.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor | None, value: Tensor, penalties: Tensor | None, order: Tensor | None,
        lengths: Tensor | None, layout: Layout, known: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, v = by_length(query), by_length(value)
        penalties = None if penalties is None else penalties.contiguous()
        k = q if key is None else by_length(key)
        if known:
            # Views, since an output can belong to one graph only.
            out, normalisers = by_length(known[0]), known[1].view_as(known[1])
        else:
            out, normalisers = _forward(q, k, v, penalties, order, lengths, layout)
        ctx.save_for_backward(q, k, v, penalties, order, lengths, out, normalisers)
        ctx.layout = layout
        ctx.mark_non_differentiable(normalisers)
        ctx.set_materialize_grads(False)
        return out.transpose(1, 2), normalisers

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, penalties, order, lengths, out, normalisers = ctx.saved_tensors
        layout: Layout = ctx.layout
        given, rounds = (q, k, v, order, _buckets(order, layout), lengths, penalties), layout.rounds
        grads = [_parts(x, rounds) for x in ((q, v) if layout.hashed else (q, k, v))]
        grad, deltas, errors = by_length(grad_out), torch.empty_like(normalisers), None
        if ctx.needs_input_grad[3]:
            seen = layout.before + layout.unit + layout.after
            errors = q.new_zeros(len(q), q.shape[2], layout.slots // layout.unit, layout.unit, seen)
        more = (out, normalisers, grad, deltas, grads[0], errors)
        _launch(queries_kernel, layout, given, more, KEEPS_SCORES=errors is not None)
        _launch(keys_kernel, layout, given, (normalisers, grad, deltas, *grads[-2:]))
        summed = [(x[:, 0] if rounds == 1 else x.sum(1, dtype=x.dtype)).transpose(1, 2) for x in grads]
        if layout.hashed:
            return summed[0], None, summed[1], *[None] * 5
        grad_penalties = None
        if errors is not None:
            by_pair = errors.sum((0, 2), dtype=torch.float32)
            grad_penalties = -_by_distance(by_pair, layout.before, penalties.shape[1]).to(penalties.dtype)
        return *summed, grad_penalties, *[None] * 4


def _buckets(order: Tensor | None, layout: Layout) -> Tensor | None:
    """Return the number of each slot's bucket, of which rounds in one ring share none; None where it does not count."""
    if order is None or not layout.in_bucket:
        return None
    found = (order & 1).cumsum(-1, dtype=torch.int32)
    if layout.ring > layout.slots:
        found += torch.arange(layout.rounds, device=order.device, dtype=torch.int32)[:, None] * layout.slots
    return found


def _by_distance(x: Tensor, before: int, distances: int) -> Tensor:
    """Sum over pairs of equal distance: (heads, unit, before + unit + after) -> (heads, distances).

    The last distance includes all larger ones.
    """
    _, unit, seen = x.shape
    # In memory row i + 1 begins seen + unit numbers after row i. With rows one number shorter it moves to the right by
    # one, so that from the last query to the first all pairs of a distance are in one column.
    moved = F.pad(x.flip(1), (0, unit)).flatten(1)[:, : unit * (seen + unit - 1)].view(len(x), unit, -1).sum(1)
    earlier, later = moved[:, : unit + before].flip(1), F.pad(moved[:, unit + before :], (1, 0))
    size = max(earlier.shape[1], later.shape[1], distances)
    found = F.pad(earlier, (0, size - earlier.shape[1])) + F.pad(later, (0, size - later.shape[1]))
    return torch.cat([found[:, : distances - 1], found[:, distances - 1 :].sum(1, keepdim=True)], dim=1)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, penalties: Tensor | None, order: Tensor | None,
    lengths: Tensor | None, layout: Layout,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, heads, width = value.shape
    parts, part_normalisers = _parts(value, layout.rounds), _parts(value[..., 0], layout.rounds, torch.float32)
    given = (query, key, value, order, _buckets(order, layout), lengths, penalties)
    _launch(forward_kernel, layout, given, (parts, part_normalisers))
    if not layout.hashed:
        return parts[:, 0], part_normalisers[:, 0]
    out, normalisers = torch.empty_like(value), torch.empty_like(part_normalisers[:, 0])
    programs = batch * heads * triton.cdiv(length, POSITIONS)
    if programs:
        with torch.cuda.device_of(value):
            combine_kernel[(programs,)](
                parts, part_normalisers, value, value if lengths is None else lengths, out, normalisers,
                heads, length, layout.rounds,
                VALUE=width, BLOCK_VALUE=_padded(width), SIZE=POSITIONS, HAS_LENGTHS=lengths is not None, num_warps=4,
            )  # fmt: skip
    return out, normalisers


def _launch(
    kernel: Any, layout: Layout, given: tuple[Any, ...], more: tuple[Tensor | None, ...], **constants: bool
) -> None:
    """Run a kernel for every block of every row.

    Args: given: the first tensors of all kernels. more: the kernel's tensors after these.
    """
    query, value, lengths, penalties = given[0], given[2], given[5], given[6]
    (batch, length, heads, width), value_width = query.shape, value.shape[-1]
    chosen = tiles(kernel, max(width, value_width), query.dtype.itemsize, layout.hashed)
    # A block is part of a unit; the smallest product of the GPU's units has 16 rows.
    queries, keys = (min(size, _padded(layout.unit)) for size in (chosen.queries, chosen.keys))
    blocks = layout.ring // layout.unit * triton.cdiv(layout.unit, keys if kernel is keys_kernel else queries)
    programs = batch * heads * (layout.rounds * layout.slots // max(1, layout.ring)) * blocks
    if not programs:
        return
    with torch.cuda.device_of(query):
        kernel[(programs,)](
            # What is not given is never read, so any tensor stands for it.
            *[query if x is None else x for x in (*given, *more)],
            *(heads, length, layout.rounds, layout.slots, layout.ring, layout.unit, layout.before, layout.after),
            *(1 if penalties is None else penalties.shape[1], layout.scale, layout.eps * width),
            WIDTH=width, VALUE=value_width, BLOCK_WIDTH=_padded(width), BLOCK_VALUE=_padded(value_width),
            QUERIES=queries, KEYS=keys, HASHED=layout.hashed, CAUSAL=layout.causal, SLIDES=layout.slides,
            IN_BUCKET=layout.in_bucket, WRAPS=layout.wraps, HAS_LENGTHS=lengths is not None,
            HAS_PENALTIES=penalties is not None, PRECISION=precision(), num_warps=chosen.warps,
            num_stages=chosen.stages, **constants,
        )  # fmt: skip


def by_length(x: Tensor) -> Tensor:
    """Return (batch, heads, length, width) as (batch, length, heads, width), a view where it lies so in memory."""
    return x.transpose(1, 2).contiguous()


def _parts(like: Tensor, rounds: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for a part of each round: (batch, rounds, ...)."""
    return like.new_empty(len(like), rounds, *like.shape[1:], dtype=dtype)


def _padded(width: int) -> int:
    """Return the size of a tile for this width; the smallest product of the GPU's units has 16."""
    return max(16, int(triton.next_power_of_2(width)))


def precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
