"""Hashed attention: pair by pair (the formula), and chunk by chunk in memory that is linear in the length.

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2, fig. 2: sort the positions by bucket, cut them into chunks, attend
to the own chunk and its neighbours. The outputs of the rounds, weighted by their parts of the normaliser (eq. 14), are
one softmax over the pairs of all rounds (eq. 12). So each round adds exp(score) x value and exp(score) to two sums,
and the first sum is divided by the second at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.nn.attention.lsh_hash import (
    check_rotations,
    hash_vectors,
    keys_of,
    mark_padding,
    pair_weights,
    sort_positions,
    visible_pairs,
)
from manyheads.nn.attention.masks import zero_padding
from manyheads.nn.chunking import chunk_slices
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.kernels.lsh_chunks import SAFE_SCORE, Layout, SortedRows, ranks_of, sorted_groups
from manyheads.nn.kernels.modes import first_derivative_only
from manyheads.nn.kernels.reversible import checkpointed

if TYPE_CHECKING:
    from manyheads.nn.attention.settings import LSHSettings
    from manyheads.nn.shapes import Float, Int


def attend_pairs(
    qk: Float[Tensor, "batch heads length head_dim"],
    v: Float[Tensor, "batch heads length value_dim"],
    buckets: Int[Tensor, "batch heads rounds length"],
    settings: LSHSettings,
    lengths: Int[Tensor, " batch"] | None = None,
    dropout_rate: float = 0.0,
) -> Float[Tensor, "batch heads length value_dim"]:
    """Attend as in the formula, every query to every key; `chunked_attention` must agree with it.

    Args: buckets: of each position in each round; lengths: real positions of each row, None: all; dropout_rate: of the
        weights.
    Returns: zeros at positions beyond the length of a row.
    Cost: O(rounds x length^2) time and memory.
    """
    counts = visible_pairs(buckets, settings, lengths).sum(dim=2)
    if settings.correct_duplicates:
        counts = counts.clamp(max=1)
    weights = dropout(pair_weights(qk, counts, settings.scale, settings.key_eps), dropout_rate)
    return zero_padding(torch.matmul(weights, v), lengths)


def sorting_order(
    buckets: Int[Tensor, "batch heads rounds length"],
    settings: LSHSettings,
    lengths: Int[Tensor, " batch"] | None = None,
) -> Int[Tensor, "batch heads rounds slots"]:
    """Sort the positions of each round by bucket; `slots` is the length rounded up to whole chunks.

    Returns: int32; for each slot of the sorted sequence 2 x its position, plus 1 if its bucket differs from that of
        the slot before. Padding comes last, in order of position.
    """
    length = buckets.shape[3]
    if lengths is not None and buckets.numel():
        padding = (torch.arange(length, device=buckets.device) >= lengths[:, None])[:, None, None]
        buckets = torch.where(padding, buckets.amax() + 1, buckets)
    ordered = sort_positions(buckets, settings.chunk_len)
    changes = F.pad(ordered.buckets[..., 1:] != ordered.buckets[..., :-1], (1, 0))
    return (2 * ordered.order + changes).int()


def _uses_triton(qk: Tensor, v: Tensor, settings: LSHSettings, rate: float = 0.0) -> bool:
    lack = None
    if settings.correct_duplicates:
        lack = "counts a pair once for each round in which it meets; set correct_duplicates to false, or leave it out."
    return policy.uses_triton("chunk attention", qk, width=max(qk.shape[-1], v.shape[-1]), rate=rate, lack=lack)


def hashed_order(
    qk: Float[Tensor, "batch heads length head_dim"],
    rotations: Float[Tensor, "heads head_dim rounds directions"],
    factors: tuple[int, ...],
    settings: LSHSettings,
    lengths: Int[Tensor, " batch"] | None = None,
) -> Int[Tensor, "batch heads rounds slots"]:
    """Return the `sorting_order` of the buckets that `hash_vectors` finds."""
    if not _uses_triton(qk, qk, settings):
        buckets = mark_padding(hash_vectors(qk, rotations, factors), lengths, math.prod(factors))
        return sorting_order(buckets, settings, lengths)
    from manyheads.nn.kernels.triton.hashing import fused_order

    check_rotations(qk, rotations, factors)
    return fused_order(qk, rotations, factors, settings.chunk_len, lengths)


def bucket_ranks(
    order: Int[Tensor, "batch heads rounds slots"], length: int
) -> Int[Tensor, "batch heads rounds length"]:
    """Return buckets that give this `sorting_order`, numbered from 0 without gaps."""
    return (order & 1).cumsum(-1).gather(-1, ranks_of(order, length))


def chunked_attention(
    qk: Float[Tensor, "batch heads length head_dim"],
    v: Float[Tensor, "batch heads length value_dim"],
    order: Int[Tensor, "batch heads rounds slots"],
    settings: LSHSettings,
    lengths: Int[Tensor, " batch"] | None = None,
    dropout_rate: float = 0.0,
    known: tuple[Tensor, ...] = (),
) -> tuple[Float[Tensor, "batch heads length value_dim"], tuple[Tensor, ...]]:
    """Attend chunk by chunk in the sorted order, with the result of `attend_pairs`.

    Args:
        order: the result of `sorting_order` with the same lengths.
        dropout_rate: of the weights. A query that sees no key keeps its own value at any rate.
        known: the second result of an earlier call with the same arguments (up to rounding): the forward pass then
            computes nothing. A reversible layer saves its second forward pass with it.

    Transforms of `torch.func` compute `attend_pairs`, at its cost.

    Returns: the output, and `known` for a later call: the output, two tensors (rows, length) and a flag.
    Cost: time O(rounds x length x chunk_len); memory O(rounds x length x width) for a few heads at a time. The
        backward pass stores the inputs, the output and one integer per round and position.
    """
    if modes.is_transformed():
        return attend_pairs(qk, v, bucket_ranks(order, qk.shape[2]), settings, lengths, dropout_rate), ()
    if _uses_triton(qk, v, settings, dropout_rate):
        from manyheads.nn.kernels.triton.chunks import fused_lsh_attention

        return fused_lsh_attention(qk, v, order, settings, lengths, known)
    keeps = torch.is_grad_enabled() and (qk.requires_grad or v.requires_grad)
    if not keeps:
        qk, v = qk.detach(), v.detach()
    seed = int(torch.randint(1 << 62, (), device="cpu")) if dropout_rate else 0
    if not modes.is_fast():
        return _by_formula(qk, v, order, settings, lengths, dropout_rate, seed), ()
    arguments = (qk, v, order, settings, lengths, dropout_rate, seed, keeps, known)
    out, *rest = _ChunkedAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    return out, (out.detach(), *rest)


def _by_formula(
    qk: Tensor, v: Tensor, order: Tensor, settings: LSHSettings, lengths: Tensor | None, rate: float, seed: int
) -> Tensor:
    """Compute `chunked_attention` by torch's operations; the scores of a tile are computed again by autograd."""
    wide = torch.promote_types(qk.dtype, torch.float32) if qk.dtype is torch.float16 else qk.dtype
    with policy.without_autocast(qk.device):
        q, values = qk.to(wide).flatten(0, 1), v.to(wide).flatten(0, 1)
        k = keys_of(q, settings.scale, settings.key_eps)
        layout = Layout.of(order, q.shape[1], lengths)
        groups = sorted_groups(layout, settings, wide, is_safe=False, rate=rate, seed=seed)
        parts = [_of_group(group, q[group.rows], k[group.rows], values[group.rows]) for group in groups]
        return torch.cat([*parts, values[:0]]).view(v.shape).to(v.dtype)


def _of_group(group: SortedRows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output of some rows. (rows, length, width)"""
    queries, keys, values = (F.pad(x.flatten(0, 1), (0, 0, 0, 1)) for x in (q, k, v))
    with torch.no_grad():
        highest = F.pad(_highest(group, q, k).view(-1, 1), (0, 0, 0, 1))

    def of_tile(tile: slice, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        chunks = group.take(queries, tile)
        scores = torch.stack([chunks @ one.transpose(1, 2) for one in group.take_keys(keys, tile)])
        counts = group.counts(tile)
        weights = (scores.to(highest.dtype) - group.take(highest, tile)).masked_fill(counts == 0, -torch.inf).exp()
        weights = weights * counts
        sums = weights.sum(dim=(0, 3))[..., None]
        dropped = group.dropout_mask(tile, weights.to(values.dtype))
        shown = weights.to(values.dtype) if dropped is None else weights.to(values.dtype) * dropped
        weighted = sum(one @ value for one, value in zip(shown, group.take_keys(values, tile), strict=True))
        return torch.cat([weighted, sums], dim=2)

    tiles = [checkpointed(of_tile, tile, queries, keys, values) for tile in group.tiles()]
    summed = group.sum_rounds(torch.cat(tiles))
    sums = summed[:, -1:]
    nothing = sums == 0
    attended = summed[:, :-1] / sums.masked_fill(nothing, 1.0)
    return group.zero_padding(torch.where(nothing, v.flatten(0, 1), attended.to(v.dtype)).view(v.shape))


@first_derivative_only
class _ChunkedAttention(torch.autograd.Function):
    """Stores no scores: the backward pass computes them again, already normalised."""

    @staticmethod
    def forward(
        ctx: Any,
        qk: Tensor,
        v: Tensor,
        order: Tensor,
        settings: LSHSettings,
        lengths: Tensor | None,
        rate: float,
        seed: int,
        keeps: bool,
        known: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        ctx.layout = None
        if known:
            out, log_sums, alone, safe = known
        else:
            with policy.without_autocast(qk.device):
                inputs, layout = _Inputs.of(qk, v, settings, is_safe=None), Layout.of(order, qk.shape[2], lengths)
                out, log_sums, alone = _forward(_groups(inputs, layout, settings, rate, seed), inputs)
                # It needs four times the memory of the order.
                ctx.layout = layout if keeps and policy.saves_launches(qk.device) else None
                safe = torch.tensor(inputs.is_safe, device="cpu")
        out = out.view(v.shape).to(v.dtype)  # float16 is computed in float32
        if keeps:
            ctx.save_for_backward(qk, v, out, log_sums, alone, order, lengths)
            ctx.settings, ctx.rate, ctx.seed, ctx.safe = settings, rate, seed, bool(safe)
        rest = tuple(one.view_as(one) for one in (log_sums, alone, safe))  # an output can belong to one graph only
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        return out, *rest

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        qk, v, out, log_sums, alone, order, lengths = ctx.saved_tensors
        with policy.without_autocast(qk.device):
            inputs = _Inputs.of(qk, v, ctx.settings, ctx.safe)
            layout = ctx.layout or Layout.of(order, qk.shape[2], lengths)
            ctx.layout = None
            groups = _groups(inputs, layout, ctx.settings, ctx.rate, ctx.seed)
            grad_qk, grad_v = _backward(groups, inputs, out.flatten(0, 1), log_sums, alone, grad_out.flatten(0, 1))
        return grad_qk.view(qk.shape).to(qk.dtype), grad_v.view(v.shape).to(v.dtype), *[None] * 7


@dataclass
class _Inputs:
    """Queries, keys and values; a row is one head of one row of the batch.

    Shape: q, k (rows, length, head_dim) and v (rows, length, value_dim) in one dtype; factors (rows, length, 1) with
        k = factors x q.
    is_safe: no score exceeds `SAFE_SCORE`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    factors: Tensor
    is_safe: bool

    @classmethod
    def of(cls, qk: Tensor, v: Tensor, settings: LSHSettings, is_safe: bool | None) -> _Inputs:
        known = (torch.bfloat16, torch.float32, torch.float64)
        compute = qk.dtype if qk.dtype in known else torch.float32
        q = qk.to(compute).flatten(0, 1)
        k = torch.empty_like(q)
        factors = q.new_empty(*q.shape[:2], 1, dtype=torch.promote_types(compute, torch.float32))
        # In pieces, because the copies in a wider dtype would need more memory than q itself.
        for piece, key, factor in _pieces(q, k, factors):
            wide = piece.to(factor.dtype)
            torch.sum(wide.square(), dim=-1, keepdim=True, out=factor)
            factor.add_(settings.key_eps * q.shape[-1]).rsqrt_().mul_(settings.scale)
            torch.mul(wide, factor, out=key)
        if is_safe is None and policy.saves_launches(q.device):
            is_safe = False  # the answer would have to be waited for
        if is_safe is None:
            longest = factors.amin().reciprocal() * settings.scale if q.numel() else factors.new_zeros(())
            is_safe = bool(longest * settings.scale <= SAFE_SCORE)
        return cls(q, k, v.to(compute).flatten(0, 1), factors, is_safe)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same parts of tensors (rows, length, width)."""
    rows, length = tensors[0].shape[:2]
    some_rows, piece_len = policy.lsh_piece(rows, length, tensors[0].device)
    for row in range(0, rows, some_rows):
        for part in chunk_slices(length, piece_len):
            yield tuple(one[row : row + some_rows, part] for one in tensors)


def _groups(inputs: _Inputs, layout: Layout, settings: LSHSettings, rate: float, seed: int) -> Iterator[SortedRows]:
    return sorted_groups(layout, settings, inputs.q.dtype, is_safe=inputs.is_safe, rate=rate, seed=seed)


def _columns(dtype: torch.dtype) -> int:
    """Return how many numbers of the dtype represent one float32 number; 1 for float32 and float64."""
    return 3 if dtype == torch.bfloat16 else 1


def _table(x: Tensor, extra: Tensor | float | None, codes: int) -> Tensor:
    """Return x (rows, length, width) as a table (rows x length + 1, columns) whose last row is zero.

    Further columns contain the numbers `extra` (rows, length), or one number for all rows; the last columns are free
    for `codes`. So a product of rows of two tables also contains the product of their `extra` numbers in the precision
    of float32. This subtracts a number from each score.
    """
    rows, length, width = x.shape
    parts = 0 if extra is None else _columns(x.dtype)
    total = width + parts + codes
    table = x.new_zeros(rows * length + 1, -(-total // 16) * 16 if x.dtype == torch.bfloat16 else total)
    table[:-1, :width].view(rows, length, width).copy_(x)
    if isinstance(extra, Tensor):
        rest = extra.flatten()
        for column in range(width, width + parts):
            part = table[:-1, column].copy_(rest)
            rest = rest - part if column + 1 < width + parts else rest
    elif extra is not None:
        table[:, width : width + parts].fill_(extra)
    return table


def _forward(groups: Iterator[SortedRows], inputs: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (rows, length, value_dim), and for each position (rows, length) the logarithm of its sum of
    exp(score) and whether it sees no key.
    """
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    out = torch.empty_like(inputs.v)
    log_sums = inputs.q.new_empty(inputs.q.shape[:2], dtype=wide)
    alone = torch.empty_like(log_sums, dtype=torch.bool)
    for group in groups:
        q, k, v = inputs.q[group.rows], inputs.k[group.rows], inputs.v[group.rows]
        codes = group.num_code_columns
        shift = None if inputs.is_safe else _highest(group, q, k)
        queries = _table(q, None if shift is None else -shift, codes)
        keys, values = _table(k, None if shift is None else 1.0, codes), _table(v, None, 0)
        weighted = values.new_empty(group.num_chunks, group.chunk_len, values.shape[1])
        sums = values.new_empty(group.num_chunks, group.chunk_len, 1, dtype=wide)
        for tile in group.tiles():
            weights = group.weights(tile, *group.operands(tile, queries, keys))
            sums[tile] = weights.sum(dim=-1, keepdim=True, dtype=wide).sum(dim=0)
            dropped = group.dropout_mask(tile, weights)
            if dropped is not None:
                weights *= dropped
            _sum_of_products(weights, group.take_keys(values, tile), out=weighted[tile])
        sums = group.sum_rounds(sums)
        nothing = sums == 0
        attended = group.sum_rounds(weighted)[:, : v.shape[2]] / sums.masked_fill(nothing, 1.0)
        attended = torch.where(nothing, v.flatten(0, 1), attended.to(v.dtype)).view(v.shape)
        out[group.rows] = group.zero_padding(attended)
        log_sum = sums.masked_fill(nothing, 1.0).log().view(q.shape[:2])
        log_sums[group.rows] = log_sum if shift is None else log_sum + shift
        alone[group.rows] = nothing.view(q.shape[:2])
    return out, log_sums, alone


def _highest(group: SortedRows, q: Tensor, k: Tensor) -> Tensor:
    """Return the highest score of each position over all rounds (rows, length); 0 if it sees no key."""
    queries, keys = _table(q, None, 0), _table(k, None, 0)
    by_chunk = queries.new_empty(group.num_chunks, group.chunk_len)
    for tile in group.tiles():
        scores = group.scores(*group.operands(tile, queries, keys))
        by_chunk[tile] = scores.masked_fill_(group.counts(tile) == 0, -torch.inf).amax(dim=(0, 3))
    highest = group.max_of_rounds(by_chunk)
    return highest.masked_fill(highest == -torch.inf, 0.0).to(torch.promote_types(q.dtype, torch.float32))


def _sum_of_products(left: Tensor, right: list[Tensor], out: Tensor) -> None:
    """Write the sum of left @ right over the offsets to `out`.

    Shape: left (offsets, chunks, n, m), right (chunks, m, width) for each offset.
    """
    torch.bmm(left[0], right[0], out=out)
    for one, other in zip(left[1:], right[1:], strict=True):
        out.baddbmm_(one, other)


def _backward(
    groups: Iterator[SortedRows], inputs: _Inputs, out: Tensor, log_sums: Tensor, alone: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries, which are also the keys, and of values: (rows, length, width) each."""
    grads = torch.empty_like(inputs.q), torch.empty_like(inputs.v)
    for group in groups:
        _backward_of_group(group, inputs, out, log_sums, alone, grad_out, grads)  # frees its tensors before the next
    return grads


def _backward_of_group(
    group: SortedRows,
    inputs: _Inputs,
    out: Tensor,
    log_sums: Tensor,
    alone: Tensor,
    grad_out: Tensor,
    written: tuple[Tensor, Tensor],
) -> None:
    """Write the gradients of a group's rows."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    grad_qk, grad_values = written
    q, k, v = inputs.q[group.rows], inputs.k[group.rows], inputs.v[group.rows]
    grad = group.zero_padding(grad_out[group.rows].to(q.dtype))
    shares = (grad.to(wide) * out[group.rows]).sum(dim=-1)
    codes = group.num_code_columns
    queries, keys = _table(q, -log_sums[group.rows], codes), _table(k, 1.0, codes)
    # d loss / d score = weight x (gradient of the weight - share). With dropout the share is subtracted after it.
    grads = _table(grad, None if group.rate else -shares, 0)
    values = _table(v, None if group.rate else 1.0, 0)
    all_shares = _table(shares[..., None], None, 0)
    sums_q = queries.new_empty(group.num_chunks, group.chunk_len, queries.shape[1])
    sums_k, sums_v = group.key_sums(keys.shape[1]), group.key_sums(grads.shape[1])
    for tile in group.tiles():
        query, key_chunks = group.operands(tile, queries, keys)
        weights = group.weights(tile, query, key_chunks)
        grad_tile = group.take(grads, tile)
        grad_weights = group.scratch("gradients", len(query))
        for one, value in zip(grad_weights, group.take_keys(values, tile), strict=True):
            torch.bmm(grad_tile, value.transpose(1, 2), out=one)
        dropped = group.dropout_mask(tile, weights)
        if dropped is not None:
            grad_weights *= dropped
            grad_weights -= group.take(all_shares, tile).to(grad_weights.dtype)
        grad_scores = grad_weights.mul_(weights)
        if dropped is not None:
            weights *= dropped
        _sum_of_products(grad_scores, key_chunks, out=sums_q[tile])
        group.add_to_keys(sums_k, tile, grad_scores, query)
        group.add_to_keys(sums_v, tile, weights, grad_tile)
    del queries, keys, grads, values, query, key_chunks, grad_tile  # from here on a step needs the most memory
    grad_q = group.sum_rounds(sums_q)[:, : q.shape[2]].to(wide)
    grad_k = group.sum_rounds(sums_k[:-1])[:, : q.shape[2]].to(wide)
    grad_v = group.sum_rounds(sums_v[:-1])[:, : v.shape[2]]
    # k = q f with f = scale / sqrt(q.q + eps d), so the component along q is removed.
    factors, flat = inputs.factors[group.rows].flatten(0, 1), q.flatten(0, 1).to(wide)
    along = (flat * grad_k).sum(dim=-1, keepdim=True) * (factors / group.settings.scale).square()
    grad_qk[group.rows] = (grad_q + factors * (grad_k - flat * along)).view(q.shape).to(q.dtype)
    grad_values[group.rows] = grad_v.view(v.shape) + torch.where(alone[group.rows][..., None], grad, 0.0)
