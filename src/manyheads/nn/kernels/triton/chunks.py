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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
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
    padded,
    store_rows,
    wide,
)

if TYPE_CHECKING:
    from manyheads.nn.attention.settings import LSHSettings

POSITIONS = 32
"""Positions of which a program combines the rounds."""


def tiles(kernel: Any, width: int, itemsize: int, hashed: bool) -> Tiles:
    """Return a kernel's tiles for heads of this width, of numbers with so many bytes: always the same.

    They were compiled for sm_80 and sm_90 without spilled registers. Shared memory: at most 56 KiB.
    """
    if itemsize == 4:  # where other numbers of threads spilled 4 to 8 bytes
        if kernel is keys_kernel:
            return Tiles(16, 16, (2 if width > 64 else 4) if hashed else 8 if width > 64 else 4, 1)
        return Tiles(16, 16, 4 if hashed and kernel is forward_kernel else 8, 1)
    if kernel is forward_kernel:
        return Tiles(64, 64 if width <= 64 else 32, 8, 1)
    return Tiles(32, 32, 4, 1) if kernel is keys_kernel else Tiles(64, 32, 8, 1)


@triton.jit
def load_of_head(x, at, heads, columns, WIDTH: tl.constexpr):
    """Load rows of one head; zeros where the position `at` is negative, and beyond WIDTH. (positions, columns)"""
    return load_rows(x, at.to(tl.int64), heads * WIDTH, at >= 0, columns, WIDTH)


@triton.jit
def _store_of_head(x, values, at, heads, columns, WIDTH: tl.constexpr):
    """Store rows of one head at positions that are not negative."""
    store_rows(x, values, at.to(tl.int64), heads * WIDTH, at >= 0, columns, WIDTH)


@triton.jit
def _block(given, sizes, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Return what this program's row and block have: the tensors of positions of the head; those of slots of the ring;
    the row's real positions; the first slots of block and unit in the ring; numbers before those of the head; the same
    for parts of rounds; the round; and the row's number.
    """
    query, key, value, order, buckets, lengths, penalties = given
    heads, length, rounds, slots, ring, unit, _, _, distances, _, _ = sizes
    each = tl.cdiv(unit, SIZE)
    blocks, rings = ring // unit * each, rounds * slots // ring
    block, line = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = line // rings // heads, line // rings % heads
    real = length
    if KIND.has_lengths:
        real = tl.load(lengths + batch).to(tl.int32)
    unit_first = block // each * unit
    first, ring_first = unit_first + block % each * SIZE, line % rings * ring
    row = wide(batch) * heads + head
    in_order, turn = row * rounds * slots + ring_first, (ring_first + first) // slots
    of_head, of_part = wide(batch) * length * heads + head, (wide(batch) * rounds + turn) * length * heads + head
    rows = (query + of_head * KIND.width, key + of_head * KIND.width, value + of_head * KIND.value_width)
    ordered = (order + in_order, buckets + in_order, penalties + head * distances)
    return rows, ordered, real, (first, unit_first), of_head, of_part, turn, row


@triton.jit
def _window(firsts, sizes, SIZE: tl.constexpr, OF_KEYS: tl.constexpr, KIND: tl.constexpr):
    """Return where the slots begin and end that a block of queries may see, or that may see a block of keys."""
    first, low = firsts
    _, _, _, _, ring, unit, before, after, _, _, _ = sizes
    if OF_KEYS:
        before, after = after, before
    begin, end = low - before, low + unit + after
    if KIND.slides:
        begin, end = first - before, first + SIZE + after
    if not KIND.wraps:
        begin, end = tl.maximum(begin, 0), tl.minimum(end, ring)
        if KIND.causal and not KIND.hashed:
            begin, end = (tl.maximum(begin, first), end) if OF_KEYS else (begin, tl.minimum(end, first + SIZE))
    return begin, end


@triton.jit
def _slots(ordered, first, end, real, ring, WRAPS: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    """Return slots, their positions, the same with -1 for padding, and their buckets."""
    order, buckets, _ = ordered
    slots = first + tl.arange(0, SIZE)
    inside, found = slots < end, slots
    if WRAPS:
        found = (slots % ring + ring) % ring
    at, bucket = found, found
    if KIND.hashed:
        at = tl.load(order + found, mask=inside, other=-2) >> 1
    if KIND.in_bucket:
        bucket = tl.load(buckets + found, mask=inside, other=0)
    return slots, at, tl.where(inside & (at < real), at, -1), bucket


@triton.jit
def _own_slots(ordered, firsts, real, sizes, SIZE: tl.constexpr, KIND: tl.constexpr):
    """Return the `_slots` of a block, with -1 for positions of others."""
    first, low = firsts
    _, length, _, _, ring, unit, _, _, _, _, _ = sizes
    block, given, at, bucket = _slots(ordered, first, low + unit, real, ring, False, SIZE, KIND)
    return block, tl.where((block < low + unit) & (given < length), given, -1), at, bucket


@triton.jit
def _unit_length(rows, key_eps):
    """Return rows with length 1, in their dtype, and the factor of each. Args: key_eps: added to the sum of squares."""
    long = rows.to(tl.float32)
    squares = tl.sum(long * long, 1) + key_eps
    factors = tl.where(squares > 0.0, tl.rsqrt(tl.where(squares > 0.0, squares, 1.0)), 0.0)  # 0 x inf would be NaN
    return (long * factors[:, None]).to(rows.dtype), factors


@triton.jit
def _scores(q, k, q_of, k_of, ordered, sizes, KIND: tl.constexpr):
    """Return the scores of a tile times log2(e), -inf where a query does not see a key, and where it does.

    Args: q_of, k_of: results of `_slots`, whose slots do not begin again where a ring ends.
    """
    q_slots, _, q_at, q_bucket = q_of
    k_slots, _, k_at, k_bucket = k_of
    _, _, _, _, _, _, before, _, distances, scale, _ = sizes
    seen = (q_at >= 0)[:, None] & (k_at >= 0)[None, :]
    behind = q_slots[:, None] - k_slots[None, :]
    if KIND.slides:  # in a bucket the slots are in order of position
        seen &= (behind > 0) & (behind <= before)
    elif KIND.causal and KIND.hashed:
        seen &= k_at[None, :] < q_at[:, None]
    elif KIND.causal:
        seen &= k_at[None, :] <= q_at[:, None]
    elif KIND.hashed:
        seen &= k_at[None, :] != q_at[:, None]
    if KIND.in_bucket:
        seen &= q_bucket[:, None] == k_bucket[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=KIND.precision) * (scale * 1.4426950408889634)
    if KIND.has_bias:
        at = tl.minimum(tl.abs(behind), distances - 1)
        scores -= tl.load(ordered[2] + at, mask=seen, other=0.0).to(tl.float32) * 1.4426950408889634
    return tl.where(seen, scores, -float("inf")), seen


@triton.jit
def _keys(key, k_of, sizes, columns, KIND: tl.constexpr):
    """Return the keys of slots, and the factors that gave them length 1, if any did."""
    k = load_of_head(key, k_of[2], sizes[0], columns, KIND.width)
    factors = 1.0
    if KIND.hashed:
        k, factors = _unit_length(k, sizes[10])
    return k, factors


@triton.jit
def forward_kernel(given, out, normalisers, sizes, KIND: tl.constexpr):
    """Write the sum of values of a block of queries, and the base-2 logarithm of the sum of their exponentials."""
    tensors, ordered, real, firsts, _of_head, of_part, _turn, _row = _block(given, sizes, KIND, KIND.queries)
    query, key, value = tensors
    heads, inner, outer = sizes[0], tl.arange(0, KIND.block_width), tl.arange(0, KIND.block_value)
    q_of = _own_slots(ordered, firsts, real, sizes, KIND.queries, KIND)
    q = load_of_head(query, q_of[2], heads, inner, KIND.width)
    highest = tl.full([KIND.queries], -float("inf"), tl.float32)
    total = tl.full([KIND.queries], 0.0, tl.float32)
    summed = tl.full([KIND.queries, KIND.block_value], 0.0, tl.float32)
    begin, end = _window(firsts, sizes, KIND.queries, False, KIND)
    for start in range(begin, end, KIND.keys):
        k_of = _slots(ordered, start, end, real, sizes[4], KIND.wraps, KIND.keys, KIND)
        k, _ = _keys(key, k_of, sizes, inner, KIND)
        scores, _ = _scores(q, k, q_of, k_of, ordered, sizes, KIND)
        weights, fade, highest, total = include(scores, highest, total)
        v = load_of_head(value, k_of[2], heads, outer, KIND.value_width)
        summed = tl.dot(weights.to(v.dtype), v, summed * fade[:, None], input_precision=KIND.precision)
    # A query that sees nothing has the sum 0 in a round, and in the end weights of 2^-inf in the backward pass.
    summed, normaliser = finish(summed, highest, total, -float("inf") if KIND.hashed else float("inf"))
    _store_of_head(out + of_part * KIND.value_width, summed, q_of[1], heads, outer, KIND.value_width)
    _store_of_head(normalisers + of_part, normaliser[:, None], q_of[1], heads, tl.arange(0, 1), 1)


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
    highest = tl.full([SIZE], -float("inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    summed = tl.zeros([SIZE, BLOCK_VALUE], tl.float32)
    for turn in range(0, rounds):
        of_part = (wide(batch) * rounds + turn) * length * heads + head
        here = load_of_head(part_normalisers + of_part, shown, heads, one, 1)
        weights, fade, highest, total = include(tl.where((shown >= 0)[:, None], here, -float("inf")), highest, total)
        part = load_of_head(parts + of_part * VALUE, shown, heads, outer, VALUE)
        summed = summed * fade[:, None] + part.to(tl.float32) * weights
    mean, normaliser = finish(summed, highest, total, float("inf"))
    of_head = wide(batch) * length * heads + head
    own = load_of_head(value + of_head * VALUE, shown, heads, outer, VALUE).to(tl.float32)
    mean = tl.where((total == 0.0)[:, None], own, mean)
    _store_of_head(out + of_head * VALUE, mean, at, heads, outer, VALUE)
    _store_of_head(normalisers + of_head, normaliser[:, None], at, heads, one, 1)


@triton.jit
def queries_kernel(given, out, normalisers, grad_out, deltas, grad_query, grad_scores, sizes, KIND: tl.constexpr):
    """Write the gradients of a block of queries, and its sums of out x gradient; if asked, the gradients of scores."""
    tensors, ordered, real, firsts, of_head, of_part, turn, row = _block(given, sizes, KIND, KIND.queries)
    query, key, value = tensors
    heads, inner, outer = sizes[0], tl.arange(0, KIND.block_width), tl.arange(0, KIND.block_value)
    q_of = _own_slots(ordered, firsts, real, sizes, KIND.queries, KIND)
    q_at = q_of[2]
    q = load_of_head(query, q_at, heads, inner, KIND.width)
    grad = load_of_head(grad_out + of_head * KIND.value_width, q_at, heads, outer, KIND.value_width)
    result = load_of_head(out + of_head * KIND.value_width, q_at, heads, outer, KIND.value_width)
    delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    here = of_head + wide(q_at) * heads
    tl.store(deltas + here, delta, mask=(q_at >= 0) & (turn == 0))  # a round has every position
    normaliser = tl.load(normalisers + here, mask=q_at >= 0, other=float("inf"))
    summed = tl.full([KIND.queries, KIND.block_width], 0.0, tl.float32)
    begin, end = _window(firsts, sizes, KIND.queries, False, KIND)
    for start in range(begin, end, KIND.keys):
        k_of = _slots(ordered, start, end, real, sizes[4], KIND.wraps, KIND.keys, KIND)
        k, _ = _keys(key, k_of, sizes, inner, KIND)
        v = load_of_head(value, k_of[2], heads, outer, KIND.value_width)
        scores, seen = _scores(q, k, q_of, k_of, ordered, sizes, KIND)
        errors = errors_of(tl.exp2(scores - normaliser[:, None]), grad, v, delta, KIND)
        if KIND.keeps_scores:
            _, _, _, slots, _, unit, before, after, _, _, _ = sizes
            across = (row * slots + q_of[0]) * (before + unit + after)
            at = across[:, None] + (k_of[0] - firsts[1] + before)[None, :]
            tl.store(grad_scores + at, errors.to(grad_scores.dtype.element_ty), mask=seen)
        summed = tl.dot((errors * sizes[9]).to(k.dtype), k, summed, input_precision=KIND.precision)
    _store_of_head(grad_query + of_part * KIND.width, summed, q_of[1], heads, inner, KIND.width)


@triton.jit
def keys_kernel(given, normalisers, grad_out, deltas, grad_key, grad_value, sizes, KIND: tl.constexpr):
    """Write the gradients of a block of keys and their values; hashed keys add theirs to that of the same queries."""
    tensors, ordered, real, firsts, of_head, of_part, turn, _row = _block(given, sizes, KIND, KIND.keys)
    query, key, value = tensors
    heads, inner, outer = sizes[0], tl.arange(0, KIND.block_width), tl.arange(0, KIND.block_value)
    normalisers, deltas, grad_out = normalisers + of_head, deltas + of_head, grad_out + of_head * KIND.value_width
    k_of = _own_slots(ordered, firsts, real, sizes, KIND.keys, KIND)
    given_at, k_at = k_of[1], k_of[2]
    k, factors = _keys(key, k_of, sizes, inner, KIND)
    v = load_of_head(value, k_at, heads, outer, KIND.value_width)
    summed_key = tl.full([KIND.keys, KIND.block_width], 0.0, tl.float32)
    summed_value = tl.full([KIND.keys, KIND.block_value], 0.0, tl.float32)
    begin, end = _window(firsts, sizes, KIND.keys, True, KIND)
    for start in range(begin, end, KIND.queries):
        q_of = _slots(ordered, start, end, real, sizes[4], KIND.wraps, KIND.queries, KIND)
        q_at = q_of[2]
        q = load_of_head(query, q_at, heads, inner, KIND.width)
        grad = load_of_head(grad_out, q_at, heads, outer, KIND.value_width)
        scores, _ = _scores(q, k, q_of, k_of, ordered, sizes, KIND)
        normaliser = tl.load(normalisers + q_at * heads, mask=q_at >= 0, other=float("inf"))
        delta = tl.load(deltas + q_at * heads, mask=q_at >= 0, other=0.0)
        summed_key, summed_value = add_queries(
            summed_key, summed_value, scores, normaliser, q, grad, v, delta, sizes[9], KIND
        )
    grad_key += of_part * KIND.width
    if KIND.hashed:
        # k = f q with f = 1 / sqrt(q.q + eps), so the component along q is removed.
        long = load_of_head(key, k_at, heads, inner, KIND.width).to(tl.float32)
        along = tl.sum(long * summed_key, 1) * factors * factors
        summed_key = (summed_key - long * along[:, None]) * factors[:, None]
        summed_key += load_of_head(grad_key, given_at, heads, inner, KIND.width).to(tl.float32)
        is_alone = tl.load(normalisers + k_at * heads, mask=(k_at >= 0) & (turn == 0), other=0.0) == float("inf")
        own = load_of_head(grad_out, tl.where(is_alone, k_at, -1), heads, outer, KIND.value_width)
        summed_value += own.to(tl.float32)
    _store_of_head(grad_key, summed_key, given_at, heads, inner, KIND.width)
    _store_of_head(grad_value + of_part * KIND.value_width, summed_value, given_at, heads, outer, KIND.value_width)


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
        penalties, order, lengths = (None if x is None else x.contiguous() for x in (penalties, order, lengths))
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
        _launch(queries_kernel, layout, given, more, errors is not None)
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
                VALUE=width, BLOCK_VALUE=padded(width), SIZE=POSITIONS, HAS_LENGTHS=lengths is not None, num_warps=4,
            )  # fmt: skip
    return out, normalisers


def _launch(
    kernel: Any, layout: Layout, given: tuple[Any, ...], more: tuple[Tensor | None, ...], keeps_scores: bool = False
) -> None:
    """Run a kernel for every block of every row.

    Args: given: the first tensors of all kernels. more: the kernel's tensors after these.
    """
    query, value, lengths, penalties = given[0], given[2], given[5], given[6]
    batch, length, heads, width = query.shape
    chosen = tiles(kernel, max(width, value.shape[-1]), query.dtype.itemsize, layout.hashed)
    # A block is part of a unit; the smallest product of the GPU's units has 16 rows.
    queries, keys = (min(size, padded(layout.unit)) for size in (chosen.queries, chosen.keys))
    blocks = layout.ring // layout.unit * triton.cdiv(layout.unit, keys if kernel is keys_kernel else queries)
    programs = batch * heads * (layout.rounds * layout.slots // max(1, layout.ring)) * blocks
    sizes = (heads, length, layout.rounds, layout.slots, layout.ring, layout.unit, layout.before, layout.after)
    distances = 1 if penalties is None else penalties.shape[1]
    launch(
        kernel, programs, given, more, ((*sizes, distances, layout.scale, layout.eps * width),),
        replace(chosen, queries=queries, keys=keys), causal=layout.causal, hashed=layout.hashed, slides=layout.slides,
        in_bucket=layout.in_bucket, wraps=layout.wraps, has_lengths=lengths is not None,
        has_bias=penalties is not None, keeps_scores=keeps_scores,
    )  # fmt: skip


def by_length(x: Tensor) -> Tensor:
    """Return (batch, heads, length, width) as (batch, length, heads, width), a view where it lies so in memory."""
    return x.transpose(1, 2).contiguous()


def _parts(like: Tensor, rounds: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for a part of each round: (batch, rounds, ...)."""
    return like.new_empty(len(like), rounds, *like.shape[1:], dtype=dtype)
