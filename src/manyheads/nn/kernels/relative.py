"""Attention with relative positions: one formula, and the fast implementations of it.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 3.3. The score of query i and key j is

    ((q_i + u) . k_j + (q_i + v) . r_(i - j)) / sqrt(head_dim)

with q, k projections of hidden states, r a projection of the encoding of a distance, u and v trained.
`relative_weights` computes exactly this. `relative_attention` computes the same with fewer copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.errors import ShapeError
from manyheads.nn.attention.masks import Causal, Mask, dense_mask
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.dropout import RowMasks, dropout
from manyheads.nn.kernels.softmax import masked_softmax, some_row_is_empty, weighted_by_sums
from manyheads.nn.shapes import Float

__all__ = ["relative_attention", "relative_shift", "relative_shift_both_ways", "relative_weights"]


def relative_shift(x: Float[Tensor, "*batch q_len k_len"]) -> Float[Tensor, "*batch q_len k_len"]:
    """Row i moved left by q_len - 1 - i places, by pad and view alone.

        >>> relative_shift(torch.tensor([[2.0, 1, 0], [2, 1, 0]])).tolist()  # distances of the last two of three places
        [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0]]

    Paper: Dai et al. 2019, appendix B. In: column t belongs to distance k_len - 1 - t. Out: column j belongs to key j,
    where the queries are the last q_len of the k_len positions. What comes in from the next row belongs to keys after
    the query, which no causal mask allows.
    """
    *batch, q_len, k_len = x.shape
    padded = F.pad(x, (1, 0)).view(*batch, k_len + 1, q_len)
    return padded[..., 1:, :].reshape(*batch, q_len, k_len)


def relative_shift_both_ways(x: Float[Tensor, "*batch q_len num_distances"]) -> Float[Tensor, "*batch q_len k_len"]:
    """`relative_shift` where keys after the query count too.

    In: column t belongs to distance k_len - 1 - t, which falls to -(q_len - 1): there are k_len + q_len - 1 of them.
    """
    *batch, q_len, num_distances = x.shape
    # In memory, row i + 1 begins num_distances numbers after row i and is to move one place less.
    moved = x.reshape(*batch, q_len * num_distances)[..., q_len - 1 : q_len * num_distances - 1]
    return moved.view(*batch, q_len, num_distances - 1)[..., : num_distances - q_len + 1] if q_len > 1 else x


def relative_weights(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    positions: Float[Tensor, "heads num_distances head_dim"],
    content_bias: Float[Tensor, "heads head_dim"],
    position_bias: Float[Tensor, "heads head_dim"] | None,
    distance_bias: Float[Tensor, "heads num_distances"] | None = None,
    mask: Mask | None = None,
    causal: bool = True,
) -> Float[Tensor, "batch heads q_len k_len"]:
    """The attention weights themselves, before dropout; see `relative_attention`.

    By plain autograd, which makes the (batch, heads, q_len, k_len) numbers several times over: the fast path's oracle.
    """
    _check(query, key, positions, causal)
    q_len, k_len = query.shape[2], key.shape[2]
    content = torch.matmul(query + content_bias[:, None].to(query.dtype), key.transpose(-1, -2))
    asking = query if position_bias is None else query + position_bias[:, None].to(query.dtype)
    by_distance = torch.matmul(asking, positions.transpose(-1, -2))
    if distance_bias is not None:
        by_distance = by_distance + distance_bias[:, None].to(by_distance.dtype)
    by_position = relative_shift(by_distance) if causal else relative_shift_both_ways(by_distance)
    scores = (content + by_position) / math.sqrt(query.shape[-1])
    allowed = dense_mask(Causal() & mask if causal else mask, q_len, k_len, query.device, k_len - q_len)
    return masked_softmax(scores, allowed)


def relative_attention(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    value: Float[Tensor, "batch heads k_len value_dim"],
    positions: Float[Tensor, "heads num_distances head_dim"],
    content_bias: Float[Tensor, "heads head_dim"],
    position_bias: Float[Tensor, "heads head_dim"] | None,
    distance_bias: Float[Tensor, "heads num_distances"] | None = None,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    causal: bool = True,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Weighted sum of the values, weights by content and distance; causal whatever the mask, or both ways.

    Paper: Dai et al. 2019, sec. 3.3. Symbols: u = content_bias, v = position_bias.
    Args:
        query: of the last q_len of the k_len positions.
        positions: row t is r of distance k_len - 1 - t: in the keys' order, as the last query sees them. k_len rows;
            both ways k_len + q_len - 1, whose last belong to keys after the query.
        position_bias: None for the learned kind, whose r stand for themselves.
        distance_bias: a trained score of every distance, in the order of `positions`.
        mask: what else is hidden: a window, padding.
        dropout_rate: on the weights; 0 outside training.
        causal: no query sees a later key; False lets it, if the mask does.

    Returns: zeros for a query that may attend to nothing.
    Raises: ShapeError: more queries than keys and causal, or not as many rows of `positions` as there are distances.
    Cost: O(q_len x k_len) numbers a head and lane are kept for the backward pass once, none without gradients; never
        (q_len, k_len, head_dim). Both ways, and on GPUs, they are kept several times.
    """
    _check(query, key, positions, causal)
    q_len, k_len = query.shape[2], key.shape[2]
    path = policy.relative_path(query, dropout_rate, causal)
    if path == "sums":
        return _by_sums(query, key, value, positions, content_bias, position_bias, distance_bias, mask)
    if path in ("sdpa", "flex"):
        by_distance = _scores_of_distances(query, positions, position_bias, distance_bias)
        asks = query + content_bias[:, None].to(query.dtype)
        allowed = dense_mask(Causal() & mask if causal else mask, q_len, k_len, query.device, k_len - q_len)
        if path == "sdpa":
            return _by_sdpa(asks, key, value, by_distance, allowed, dropout_rate, causal)
        return _by_flex(asks, key, value, by_distance, allowed)
    if path == "products":
        weights = relative_weights(query, key, positions, content_bias, position_bias, distance_bias, mask, causal)
        return torch.matmul(dropout(weights, dropout_rate), value)
    allowed = dense_mask(Causal() & mask, q_len, k_len, query.device, k_len - q_len)
    given = [query, key, value, positions, content_bias, position_bias, distance_bias]
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if not keeps:
        given = [None if t is None else t.detach() for t in given]
    out: Tensor = _RelativeAttention.apply(*given, allowed, dropout_rate, keeps)  # type: ignore[no-untyped-call]
    return out


def _check(query: Tensor, key: Tensor, positions: Tensor, causal: bool) -> None:
    q_len, k_len = query.shape[2], key.shape[2]
    if causal and q_len > k_len:
        raise ShapeError(f"{q_len} queries cannot be the last of {k_len} positions.")
    if causal and positions.shape[1] != k_len:
        raise ShapeError(f"{positions.shape[1]} encoded distances do not fit {k_len} keys; give one a key.")
    if not causal and positions.shape[1] != k_len + q_len - 1:
        raise ShapeError(
            f"{positions.shape[1]} encoded distances do not fit {q_len} queries and {k_len} keys; both ways there are"
            f" {k_len + q_len - 1} distances."
        )


def _by_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    content_bias: Tensor,
    position_bias: Tensor | None,
    distance_bias: Tensor | None,
    mask: Mask | None,
) -> Tensor:
    """`relative_attention` of the last position alone for a compiler, in float32 at least: see `weighted_by_sums`.

    Its distances already stand in the order of the keys, so there is nothing to shift.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scale, k_len = 1 / math.sqrt(query.shape[-1]), key.shape[2]
    asks = query.to(wide)
    by_content = (asks + content_bias[:, None].to(wide)) * scale
    by_position = (asks if position_bias is None else asks + position_bias[:, None].to(wide)) * scale
    scores = (by_content[:, :, :, None] * key.to(wide)[:, :, None]).sum(-1)
    scores = scores + (by_position[:, :, :, None] * positions.to(wide)[None, :, None]).sum(-1)
    if distance_bias is not None:
        scores = scores + distance_bias[:, None].to(wide) * scale
    allowed = dense_mask(mask, 1, k_len, query.device, k_len - 1)
    return weighted_by_sums(scores, value, allowed).to(query.dtype)


def _scores_of_distances(
    query: Tensor, positions: Tensor, position_bias: Tensor | None, distance_bias: Tensor | None
) -> Tensor:
    """Each query's score of every distance, scaled, in the order of `positions`: (batch, heads, q_len, distances)."""
    scale = 1 / math.sqrt(query.shape[-1])
    asking = query if position_bias is None else query + position_bias[:, None].to(query.dtype)
    # The scale is taken into the small side.
    by_distance = torch.matmul(asking * scale, positions.transpose(-1, -2))
    if distance_bias is not None:
        by_distance = by_distance + (distance_bias[:, None] * scale).to(by_distance.dtype)
    return by_distance


def _by_sdpa(
    asks: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor,
    allowed: Tensor | None,
    dropout_rate: float,
    causal: bool,
) -> Tensor:
    """By torch's fused kernel, with the scores of the distances as an additive mask, which gets a gradient.

    Args: asks: query + u; by_distance: see `_scores_of_distances`; allowed: True = may attend, causal where `causal`.

    A query that may attend to nothing is given all keys and its result is replaced by zeros: kernels differ in what
    they return for a row of -inf, and its gradient would be NaN.
    """
    scores = relative_shift(by_distance) if causal else relative_shift_both_ways(by_distance)
    some = None
    if allowed is not None:
        some = allowed.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~allowed & some, -math.inf)
    out = F.scaled_dot_product_attention(asks, key, value, attn_mask=scores.to(asks.dtype), dropout_p=dropout_rate)
    return out if some is None else out.masked_fill(~some, 0.0)


def _by_flex(asks: Tensor, key: Tensor, value: Tensor, by_distance: Tensor, allowed: Tensor | None) -> Tensor:
    """By FlexAttention, which reads the score of each distance where it lies: nothing is shifted or copied.

    Without dropout. On a CPU without gradients. Args: see `_by_sdpa`.
    """
    q_len, num_distances = asks.shape[2], by_distance.shape[-1]
    some = None
    if allowed is not None:
        some = allowed.any(dim=-1, keepdim=True)
        shown = (allowed | ~some).expand(asks.shape[0], asks.shape[1], q_len, key.shape[2])

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, of_key: Tensor) -> Tensor:
        # Keys after the query have no distance where attention is causal; what is read for them is hidden.
        column = (of_key + (q_len - 1 - query)).clamp(max=num_distances - 1)
        score = score + by_distance[batch, head, query, column]
        return score if some is None else torch.where(shown[batch, head, query, of_key], score, -math.inf)

    out = _flex_attention(policy.runs_flex_eagerly(asks))(asks, key, value, score_mod=score_mod)
    assert isinstance(out, Tensor)
    return out if some is None else out.masked_fill(~some, 0.0)


@cache
def _flex_attention(eager: bool) -> Callable[..., Any]:
    """torch's FlexAttention. eager: without compiling it, in which case it writes out all scores."""
    from torch.nn.attention.flex_attention import flex_attention  # takes a quarter of a second

    if eager:
        return flex_attention
    return torch.compile(flex_attention)


def _shifted(by_distance: Tensor) -> Tensor:
    """`relative_shift` as a view. by_distance: (heads, lanes, q_len, k_len), contiguous -> (lanes, heads, q_len, k_len)

    In memory, row i + 1 begins k_len numbers after row i and is to move one place less: a step of k_len - 1 does it.
    """
    heads, lanes, q_len, k_len = by_distance.shape
    strides = (q_len * k_len, lanes * q_len * k_len, k_len - 1, 1)
    return by_distance.as_strided((lanes, heads, q_len, k_len), strides, by_distance.storage_offset() + q_len - 1)


def _unshifted(shifted: Tensor, out: Tensor | None = None) -> Tensor:
    """The transpose of `_shifted` for gradients, which are zero at keys after the query.

    Shape: (lanes, heads, q_len, k_len) -> (heads, lanes, q_len, k_len). out: where to, if it has that shape: what an
    earlier call returned.
    """
    lanes, heads, q_len, k_len = shifted.shape
    if out is None or out.shape[1] != lanes:
        out = shifted.new_zeros(heads, lanes, q_len, k_len)
    flat = out.view(heads, lanes, q_len * k_len)
    # The last column of all rows but the last belongs to keys after the query; the rest lies in one piece.
    flat[..., q_len - 1 : -1].view(heads, lanes, q_len, k_len - 1).copy_(shifted[..., :-1].transpose(0, 1))
    flat[..., -1] = shifted[:, :, -1, -1].t()
    return out


class _RelativeAttention(torch.autograd.Function):
    """A few lanes at a time, so that scores stay in cache; keeps the weights and nothing else of their size."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        content_bias: Tensor,
        position_bias: Tensor | None,
        distance_bias: Tensor | None,
        allowed: Tensor,
        rate: float,
        keeps: bool,
    ) -> Tensor:
        compute, positions_dtype = query.dtype, positions.dtype
        batch, heads, q_len, head_dim = query.shape
        k_len = key.shape[2]
        scale = 1 / math.sqrt(head_dim)
        with torch.autocast(query.device.type, enabled=False):
            # The scale is taken into the small side: q_len x head_dim numbers in place of q_len x k_len.
            key, value = _laid_out(key.to(compute)), _laid_out(value.to(compute))
            positions = positions.to(compute)
            place_columns = positions.transpose(-1, -2)
            content_add, position_add, distance_add = (
                None if bias is None else (bias * scale).to(compute)[:, None]
                for bias in (content_bias, position_bias, distance_bias)
            )  # (heads, 1, head_dim or k_len)
            by_content = _biased(query, content_add, scale, out=query.new_empty(query.shape))
            position_add = None if position_add is None else position_add[:, None]
            hidden = torch.zeros(allowed.shape, dtype=compute, device=query.device)
            hidden.masked_fill_(~allowed, -torch.inf)
            empty_rows = some_row_is_empty(allowed)
            out = query.new_empty(batch, heads, q_len, value.shape[-1])
            weights = query.new_empty(batch, heads, q_len, k_len) if keeps else None
            kept = query.new_empty(batch, heads, q_len, k_len) if keeps and rate else None
            masks = RowMasks(batch, heads * q_len * k_len, rate, query.device) if rate else None
            by_position = query.new_empty(query.numel())
            lanes = policy.lanes_at_once(batch, heads * q_len * k_len, query.device)
            room = query.new_empty(min(lanes, batch), heads, q_len, k_len)
            # All tiles' views in one call: a view costs the call.
            askings = _askings(by_position, query.shape, lanes)
            key_columns = torch.split(_flat(key).transpose(-1, -2), lanes * heads)
            by_contents, values, outs = (torch.split(_flat(x), lanes * heads) for x in (by_content, value, out))
            for n, first in enumerate(range(0, batch, lanes)):
                here = slice(first, first + lanes)
                asks = query[here]
                count = len(asks)
                _biased(asks.transpose(0, 1), position_add, scale, out=askings[n].view(heads, count, q_len, head_dim))
                by_distance = torch.bmm(askings[n], place_columns).view(heads, count, q_len, k_len)
                if distance_add is not None:
                    by_distance += distance_add[:, None]
                scores = room[:count]
                torch.add(_shifted(by_distance), hidden[here] if hidden.shape[0] > 1 else hidden, out=scores)
                _flat(scores).baddbmm_(by_contents[n], key_columns[n])
                # In float32 inside, whatever the scores' type.
                tile = torch.softmax(scores, dim=-1, out=None if weights is None else weights[here])
                if empty_rows:
                    tile.masked_fill_(~(allowed[here] if allowed.shape[0] > 1 else allowed), 0.0)
                if masks is not None:
                    tile_kept = masks.of(tile, first)
                    tile = tile * tile_kept
                    if kept is not None:
                        kept[here] = tile_kept
                torch.bmm(_flat(tile), values[n], out=outs[n])
        if keeps:
            ctx.save_for_backward(by_content, by_position, key, value, positions, weights, kept)
            ctx.scale = scale
            ctx.dtypes = [None if t is None else t.dtype for t in (content_bias, position_bias, distance_bias)]
            ctx.positions_dtype = positions_dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        by_content, by_position, key, value, positions, weights, kept = ctx.saved_tensors
        content_dtype, position_dtype, distance_dtype = ctx.dtypes
        batch, heads, q_len, k_len = weights.shape
        statistics = torch.promote_types(weights.dtype, torch.float32)
        grad_content, grad_position = torch.empty_like(by_content), torch.empty_like(by_content)
        grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
        grad_positions = torch.zeros_like(positions, dtype=statistics)
        grad_distance = torch.zeros(heads, k_len, dtype=statistics, device=key.device) if distance_dtype else None
        lanes = policy.lanes_at_once(batch, heads * q_len * k_len, key.device)
        room: Tensor | None = None
        with torch.autocast(key.device.type, enabled=False):
            grad_outs = torch.split(_flat(grad_out.to(weights.dtype)), lanes * heads)
            askings = _askings(by_position, by_content.shape, lanes)
            by_contents, keys, values, grad_contents, grad_keys, grad_values = (
                torch.split(_flat(x), lanes * heads)
                for x in (by_content, key, value, grad_content, grad_key, grad_value)
            )
            for n, first in enumerate(range(0, batch, lanes)):
                here = slice(first, first + lanes)
                tile = used = weights[here]
                grad_tile = torch.bmm(grad_outs[n], values[n].transpose(-1, -2)).view_as(tile)
                if kept is not None:
                    grad_tile *= kept[here]
                    used = tile * kept[here]
                torch.bmm(_flat(used).transpose(-1, -2), grad_outs[n], out=grad_values[n])
                grad_scores = torch._softmax_backward_data(grad_tile, tile, -1, tile.dtype)
                flat = _flat(grad_scores)
                torch.bmm(flat, keys[n], out=grad_contents[n])
                torch.bmm(flat.transpose(-1, -2), by_contents[n], out=grad_keys[n])
                room = _unshifted(grad_scores, room)
                by_distance = room.flatten(1, 2)  # (heads, lanes x q_len, k_len)
                grad_asking = torch.bmm(by_distance, positions).view(heads, -1, q_len, positions.shape[-1])
                grad_position[here] = grad_asking.transpose(0, 1)
                grad_positions += torch.bmm(by_distance.transpose(-1, -2), askings[n])
                if grad_distance is not None:
                    grad_distance += by_distance.sum(dim=1, dtype=statistics)

            def of_bias(grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
                return None if dtype is None else (grad.sum(dim=(0, 2), dtype=statistics) * ctx.scale).to(dtype)

            # Heads behind queries in memory, as the projection's gradient wants it, which would else copy it.
            grad_query = by_content.new_empty(batch, q_len, heads, by_content.shape[-1]).transpose(1, 2)
            torch.add(grad_content, grad_position, out=grad_query).mul_(ctx.scale)
            return (
                grad_query,
                grad_key,
                grad_value,
                grad_positions.to(ctx.positions_dtype),
                of_bias(grad_content, content_dtype),
                of_bias(grad_position, position_dtype),
                None if grad_distance is None else (grad_distance * ctx.scale).to(distance_dtype),
                None,
                None,
                None,
            )


def _biased(query: Tensor, bias: Tensor | None, scale: float, out: Tensor) -> Tensor:
    """query * scale + bias, rounded once."""
    return torch.mul(query, scale, out=out) if bias is None else torch.add(bias, query, alpha=scale, out=out)


def _askings(by_position: Tensor, shape: torch.Size, lanes: int) -> list[Tensor]:
    """The queries of some lanes after those of others, as the product with positions takes them: heads come first.

    Shape: (batch x heads x q_len x head_dim,) -> of (heads, lanes x q_len, head_dim) each. Args: shape: the queries'.
    """
    _, heads, q_len, head_dim = shape
    parts = torch.split(by_position, lanes * heads * q_len * head_dim)
    return [part.view(heads, part.numel() // (heads * head_dim), head_dim) for part in parts]


def _flat(x: Tensor) -> Tensor:
    """Lanes and heads as one axis."""
    return x.flatten(0, 1)


def _laid_out(x: Tensor) -> Tensor:
    """Keys or values as products take them without copying: else each tile would be copied, keys turned over.

    Lanes and heads must be one axis in memory, which they are in a cache; of 16 bits a part of a buffer will not do.
    """
    if policy.wants_contiguous(x):
        return x.contiguous()
    return x.flatten(0, 1).view(x.shape)
