"""Attention with relative positions: one formula, and fast implementations of it.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 3.3. The score of query i and key j is

    ((q_i + u) . k_j + (q_i + v) . r_(i - j)) / sqrt(head_dim)

where q and k are projections of hidden states, r is a projection of the encoding of a distance, and u and v are
trained. `relative_weights` is this formula. `relative_attention` computes it with the implementation that `policy`
selects.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.nn.attention.masks import Causal, Mask, NeverEmpty, dense_mask
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.attention import (
    check_distances,
    key_of_layers,
    masked_softmax,
    some_row_is_empty,
    weighted_by_sums,
)
from manyheads.nn.kernels.dropout import RowMasks, dropout
from manyheads.nn.kernels.modes import first_derivative_only
from manyheads.nn.shapes import Float, check_axes


def attend_by_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    content_bias: Tensor,
    position_bias: Tensor | None,
    distance_bias: Tensor | None,
    allowed: Tensor,
    dropout_rate: float,
) -> Tensor:
    """Compute causal `kernels.relative.relative_attention`, a few lanes at a time, so that scores stay in the cache.

    Autograd would store the (batch, heads, q_len, k_len) numbers several times; this stores the weights once, and the
    dropout mask. allowed: True = may attend, causal; broadcastable to (batch, heads, q_len, k_len).
    """
    given = [query, key, value, positions, content_bias, position_bias, distance_bias]
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if not needs_grad:
        given = [None if t is None else t.detach() for t in given]
    out: Tensor = _RelativeAttention.apply(*given, allowed, dropout_rate, needs_grad)  # type: ignore[no-untyped-call]
    return out


@first_derivative_only
class _RelativeAttention(torch.autograd.Function):
    """Computes one tile of lanes at a time, so its scores stay in the cache.

    Stores weights and dropout mask for the backward pass.
    """

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
        needs_grad: bool,
    ) -> Tensor:
        compute, positions_dtype = query.dtype, positions.dtype
        batch, heads, q_len, head_dim = query.shape
        k_len = key.shape[2]
        scale = 1 / math.sqrt(head_dim)
        with policy.without_autocast(query.device):
            # Queries and biases are scaled, not scores: q_len x head_dim numbers instead of q_len x k_len.
            key, value = _joined(key.to(compute)), _joined(value.to(compute))
            positions = positions.to(compute)
            content_add, position_add, distance_add = (
                None if bias is None else (bias * scale).to(compute)[:, None]
                for bias in (content_bias, position_bias, distance_bias)
            )  # (heads, 1, head_dim or k_len)
            position_add = None if position_add is None else position_add[:, None]
            content_query = _biased(query, content_add, scale, out=query.new_empty(query.shape))
            position_query = query.new_empty(query.numel())
            hidden = torch.zeros(allowed.shape, dtype=compute, device=query.device)
            hidden.masked_fill_(~allowed, -torch.inf)
            has_empty_rows = some_row_is_empty(allowed)
            out = query.new_empty(batch, heads, q_len, value.shape[-1])
            weights = query.new_empty(batch, heads, q_len, k_len) if needs_grad else None
            kept = query.new_empty(batch, heads, q_len, k_len) if needs_grad and rate else None
            masks = RowMasks(batch, heads * q_len * k_len, rate, query.device) if rate else None
            lanes = policy.lanes_at_once(batch, heads * q_len * k_len, query.device)
            buffer = query.new_empty(min(lanes, batch), heads, q_len, k_len)
            # The views of all tiles in one call: calls of operations are a large part of a step (experiments).
            position_queries = _position_queries(position_query, query.shape, lanes)
            key_columns = torch.split(_flat(key).transpose(-1, -2), lanes * heads)
            content_queries, values, outs = (torch.split(_flat(x), lanes * heads) for x in (content_query, value, out))
            for n, first in enumerate(range(0, batch, lanes)):
                here = slice(first, first + lanes)
                tile_query = query[here].transpose(0, 1)
                count = tile_query.shape[1]
                into = position_queries[n].view(heads, count, q_len, head_dim)
                _biased(tile_query, position_add, scale, out=into)
                by_distance = torch.bmm(position_queries[n], positions.transpose(-1, -2))
                by_distance = by_distance.view(heads, count, q_len, k_len)
                if distance_add is not None:
                    by_distance += distance_add[:, None]
                scores = buffer[:count]
                torch.add(_shifted(by_distance), hidden[here] if hidden.shape[0] > 1 else hidden, out=scores)
                _flat(scores).baddbmm_(content_queries[n], key_columns[n])
                # torch's softmax sums at least in float32, whatever the dtype of the scores.
                tile = torch.softmax(scores, dim=-1, out=None if weights is None else weights[here])
                if has_empty_rows:
                    tile.masked_fill_(~(allowed[here] if allowed.shape[0] > 1 else allowed), 0.0)
                if masks is not None:
                    tile_kept = masks.of(tile, first)
                    tile = tile * tile_kept
                    if kept is not None:
                        kept[here] = tile_kept
                torch.bmm(_flat(tile), values[n], out=outs[n])
        if needs_grad:
            ctx.save_for_backward(content_query, position_query, key, value, positions, weights, kept)
            ctx.scale = scale
            ctx.dtypes = [None if t is None else t.dtype for t in (content_bias, position_bias, distance_bias)]
            ctx.positions_dtype = positions_dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        content_query, position_query, key, value, positions, weights, kept = ctx.saved_tensors
        content_dtype, position_dtype, distance_dtype = ctx.dtypes
        batch, heads, q_len, k_len = weights.shape
        statistics = torch.promote_types(weights.dtype, torch.float32)
        grad_content, grad_position = torch.empty_like(content_query), torch.empty_like(content_query)
        grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
        grad_positions = torch.zeros_like(positions, dtype=statistics)
        grad_distance = torch.zeros(heads, k_len, dtype=statistics, device=key.device) if distance_dtype else None
        lanes = policy.lanes_at_once(batch, heads * q_len * k_len, key.device)
        buffer: Tensor | None = None
        with policy.without_autocast(key.device):
            grad_outs = torch.split(_flat(grad_out.to(weights.dtype)), lanes * heads)
            position_queries = _position_queries(position_query, content_query.shape, lanes)
            content_queries, keys, values, grad_contents, grad_keys, grad_values = (
                torch.split(_flat(x), lanes * heads)
                for x in (content_query, key, value, grad_content, grad_key, grad_value)
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
                torch.bmm(flat.transpose(-1, -2), content_queries[n], out=grad_keys[n])
                buffer = _unshifted(grad_scores, buffer)
                by_distance = buffer.flatten(1, 2)  # (heads, lanes x q_len, k_len)
                grad_tile_query = torch.bmm(by_distance, positions).view(heads, -1, q_len, positions.shape[-1])
                grad_position[here] = grad_tile_query.transpose(0, 1)
                grad_positions += torch.bmm(by_distance.transpose(-1, -2), position_queries[n])
                if grad_distance is not None:
                    grad_distance += by_distance.sum(dim=1, dtype=statistics)

            def of_bias(grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
                return None if dtype is None else (grad.sum(dim=(0, 2), dtype=statistics) * ctx.scale).to(dtype)

            # Length before heads in memory: the backward pass of the projection would otherwise copy it.
            grad_query = content_query.new_empty(batch, q_len, heads, content_query.shape[-1]).transpose(1, 2)
            torch.add(grad_content, grad_position, out=grad_query).mul_(ctx.scale)
            return (
                grad_query,
                grad_key,
                grad_value,
                grad_positions.to(ctx.positions_dtype),
                of_bias(grad_content, content_dtype),
                of_bias(grad_position, position_dtype),
                None if grad_distance is None else (grad_distance * ctx.scale).to(distance_dtype),
                *[None] * 3,
            )


def _shifted(by_distance: Tensor) -> Tensor:
    """Return `relative_shift` as a view of contiguous scores.

    Row i + 1 begins k_len numbers after row i in memory and moves one column less: a stride of k_len - 1 does both.
    Shape: (heads, lanes, q_len, k_len) -> (lanes, heads, q_len, k_len)
    """
    heads, lanes, q_len, k_len = by_distance.shape
    strides = (q_len * k_len, lanes * q_len * k_len, k_len - 1, 1)
    return by_distance.as_strided((lanes, heads, q_len, k_len), strides, by_distance.storage_offset() + q_len - 1)


def _unshifted(shifted: Tensor, out: Tensor | None = None) -> Tensor:
    """Apply the transpose of `_shifted` to gradients, which are zero at keys after the query.

    Shape: (lanes, heads, q_len, k_len) -> (heads, lanes, q_len, k_len)
    Args: out: the result of an earlier call, which is overwritten if it has the right shape.
    """
    lanes, heads, q_len, k_len = shifted.shape
    if out is None or out.shape[1] != lanes:
        out = shifted.new_zeros(heads, lanes, q_len, k_len)
    flat = out.view(heads, lanes, q_len * k_len)
    # The last column of all rows except the last belongs to keys after the query; the others are one block of memory.
    flat[..., q_len - 1 : -1].view(heads, lanes, q_len, k_len - 1).copy_(shifted[..., :-1].transpose(0, 1))
    flat[..., -1] = shifted[:, :, -1, -1].t()
    return out


def _biased(query: Tensor, bias: Tensor | None, scale: float, out: Tensor) -> Tensor:
    """Write query * scale + bias to `out`, rounded once."""
    return torch.mul(query, scale, out=out) if bias is None else torch.add(bias, query, alpha=scale, out=out)


def _position_queries(position_query: Tensor, shape: torch.Size, lanes: int) -> list[Tensor]:
    """Return the views of the tiles, with heads first, as the product with `positions` takes them.

    Shape: (batch x heads x q_len x head_dim,) -> (heads, lanes x q_len, head_dim) each. Args: shape: of the query.
    """
    _, heads, q_len, head_dim = shape
    parts = torch.split(position_query, lanes * heads * q_len * head_dim)
    return [part.view(heads, part.numel() // (heads * head_dim), head_dim) for part in parts]


def _flat(x: Tensor) -> Tensor:
    """Join lanes and heads to one axis."""
    return x.flatten(0, 1)


def _joined(x: Tensor) -> Tensor:
    """Return keys or values whose lanes and heads are one axis in memory, as products take them without a copy.

    Otherwise each tile would be copied, and keys transposed. Parts of a cache already have this layout; `policy` says
    where they must be contiguous too.
    """
    return x.contiguous() if policy.wants_contiguous(x) else _flat(x).view(x.shape)


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
    """Return the attention weights before dropout, as in the formula; arguments as for `relative_attention`.

    Memory: autograd stores the (batch, heads, q_len, k_len) numbers several times.
    Raises: ShapeError: as `relative_attention`.
    """
    q_len, k_len = query.shape[2], key.shape[2]
    check_distances(q_len, k_len, positions.shape[1], causal)
    content = torch.matmul(query + content_bias[:, None].to(query.dtype), key.transpose(-1, -2))
    position_query = query if position_bias is None else query + position_bias[:, None].to(query.dtype)
    by_distance = torch.matmul(position_query, positions.transpose(-1, -2))
    if distance_bias is not None:
        by_distance = by_distance + distance_bias[:, None].to(by_distance.dtype)
    by_position = relative_shift(by_distance) if causal else relative_shift_both_ways(by_distance)
    scores = (content + by_position) / math.sqrt(query.shape[-1])
    allowed = dense_mask(Causal() & mask if causal else mask, q_len, k_len, query.device, k_len - q_len, query.shape[0])
    return masked_softmax(scores, allowed)


def relative_shift(x: Float[Tensor, "*batch q_len k_len"]) -> Float[Tensor, "*batch q_len k_len"]:
    """Move row i to the left by q_len - 1 - i columns, with one pad and one view.

        >>> relative_shift(torch.tensor([[2.0, 1, 0], [2, 1, 0]])).tolist()  # distances for the last two of three keys
        [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0]]

    Paper: Dai et al. 2019, appendix B. Input: column t has the score of distance k_len - 1 - t. Output: column j has
    the score of key j; the queries are the last q_len of the k_len positions. The last columns of a row then contain
    numbers of the next row. They belong to keys after the query, which a causal mask hides.
    """
    check_axes("x", x, "..., q_len, k_len")
    *batch, q_len, k_len = x.shape
    padded = F.pad(x, (1, 0)).view(*batch, k_len + 1, q_len)
    return padded[..., 1:, :].reshape(*batch, q_len, k_len)


def relative_shift_both_ways(x: Float[Tensor, "*batch q_len num_distances"]) -> Float[Tensor, "*batch q_len k_len"]:
    """Do the same as `relative_shift` for attention in both directions, where keys after the query count too.

    Input: column t has the score of distance k_len - 1 - t. The last distance is -(q_len - 1), so there are
    k_len + q_len - 1 columns.
    """
    *batch, q_len, num_distances = x.shape
    # In memory row i + 1 begins num_distances numbers after row i, and it must move one column less.
    moved = x.reshape(*batch, q_len * num_distances)[..., q_len - 1 : q_len * num_distances - 1]
    return moved.view(*batch, q_len, num_distances - 1)[..., : num_distances - q_len + 1] if q_len > 1 else x


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
    fused: bool = False,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Return the sum of the values, weighted by content and distance.

    Paper: Dai et al. 2019, sec. 3.3. Symbols: u = content_bias, v = position_bias, r = positions.
    Args:
        query: of the last q_len of the k_len positions.
        positions: row t is r of distance k_len - 1 - t, so rows have the order of the keys for the last query. If
            causal there are k_len rows, otherwise k_len + q_len - 1, the last of which belong to keys after the query.
        position_bias: None: v is 0, as for learned distances.
        distance_bias: a trained score of each distance, in the order of `positions`; None: 0.
        mask: further restrictions, for example a window or padding.
        dropout_rate: of the weights; 0 outside training.
        causal: no query attends to a later key; False: the mask alone decides.
        fused: by Triton kernels, or not at all, except under a transform of `torch.func`; False: as `policy` decides.

    Returns: zeros for a query that may not attend to any key.
    Raises: ShapeError: causal with more queries than keys, or the number of rows of `positions` is wrong; RequestError:
        fused, and the kernels cannot compute this.
    Cost: for the backward pass one number per head, query and key, and one more with dropout; several in both
        directions and on GPUs. Without gradients none. Never (q_len, k_len, head_dim) numbers.
    """
    q_len, k_len = query.shape[2], key.shape[2]
    check_distances(q_len, k_len, positions.shape[1], causal)
    width = max(query.shape[-1], value.shape[-1])
    if policy.uses_triton("relative attention", query, query.dtype, width, dropout_rate, fused):
        from manyheads.nn.kernels.triton import fused_relative_attention

        return fused_relative_attention(
            query, key, value, positions, content_bias, position_bias, distance_bias, mask, causal
        )
    path = policy.relative_path(query, causal) if q_len else "products"
    if path == "sums":
        return _by_sums(query, key, value, positions, content_bias, position_bias, distance_bias, mask)
    if path == "sdpa":
        by_position = _scores_of_distances(query, positions, position_bias, distance_bias, causal)
        content_query = query + content_bias[:, None].to(query.dtype)
        hidden, empty = _hidden_of_layers(mask, query, k_len, causal)
        return _by_sdpa(content_query, key, value, by_position, hidden, empty, dropout_rate)
    if path == "products":
        weights = relative_weights(query, key, positions, content_bias, position_bias, distance_bias, mask, causal)
        return torch.matmul(dropout(weights, dropout_rate), value)
    allowed = dense_mask(Causal() & mask, q_len, k_len, query.device, k_len - q_len, query.shape[0])
    assert allowed is not None  # a causal mask never allows everything
    return attend_by_tiles(
        query, key, value, positions, content_bias, position_bias, distance_bias, allowed, dropout_rate
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
    """Use elementwise products and sums, at least in float32, for one query in a compiled step on a CPU.

    The compiler fuses them into one loop (see `weighted_by_sums`). The distances of the last position already have the
    order of the keys, so nothing is shifted.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scale, k_len = 1 / math.sqrt(query.shape[-1]), key.shape[2]
    query_wide = query.to(wide)
    content_query = (query_wide + content_bias[:, None].to(wide)) * scale
    position_query = (
        query_wide * scale if position_bias is None else (query_wide + position_bias[:, None].to(wide)) * scale
    )
    scores = (content_query[:, :, :, None] * key.to(wide)[:, :, None]).sum(-1)
    scores = scores + (position_query[:, :, :, None] * positions.to(wide)[None, :, None]).sum(-1)
    if distance_bias is not None:
        scores = scores + distance_bias[:, None].to(wide) * scale
    allowed = dense_mask(mask, 1, k_len, query.device, k_len - 1, query.shape[0])
    return weighted_by_sums(scores, value, allowed).to(query.dtype)


def _scores_of_distances(
    query: Tensor, positions: Tensor, position_bias: Tensor | None, distance_bias: Tensor | None, causal: bool
) -> Tensor:
    """Return the scaled scores by distance, shifted: one for each query and key. (batch, heads, q_len, k_len)"""
    scale = 1 / math.sqrt(query.shape[-1])
    position_query = query if position_bias is None else query + position_bias[:, None].to(query.dtype)
    bias = None if distance_bias is None else (distance_bias[:, None] * scale).to(query.dtype)
    if causal and policy.saves_launches(query.device) and not modes.is_compiled():
        return _scores_by_head(position_query, positions, scale, bias)
    by_distance = torch.matmul(position_query * scale, positions.transpose(-1, -2))
    by_distance = by_distance if bias is None else by_distance + bias
    return relative_shift(by_distance) if causal else relative_shift_both_ways(by_distance)


def _scores_by_head(query: Tensor, positions: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Compute `_scores_of_distances` by one product for each head; for each row, the positions would be copied.

    With a column before the first, a view shifts the scores; it is added to the positions, which are smaller.
    Args: query: with its bias. bias: of the scores, (heads, 1, k_len).
    """
    batch, heads, q_len, _ = query.shape
    queries, k_len = query.transpose(0, 1).flatten(1, 2), positions.shape[1]
    ahead = int(q_len > 1)
    if ahead:
        positions, bias = F.pad(positions, (0, 0, 1, 0)), None if bias is None else F.pad(bias, (1, 0))
    # Rows of a multiple of 8 numbers, which SDPA would otherwise make.
    space = queries.new_empty(heads, batch * q_len, 1, -(-k_len // 8) * 8)
    out = None if torch.is_grad_enabled() or ahead else space[:, :, 0, :k_len]
    start = space[:, :, 0, :1]  # not read
    scores = torch.baddbmm(start, queries, positions.transpose(1, 2), beta=0, alpha=scale, out=out)
    if out is not None:
        shifted = space[..., :k_len].transpose(0, 1)
        return shifted if bias is None else shifted + bias
    scores = scores if bias is None else scores + bias
    if not ahead:
        return scores[:, :, None].transpose(0, 1)
    rows = scores.view(heads, batch, q_len * (k_len + 1))[..., q_len:]
    return rows.view(heads, batch, q_len, k_len).transpose(0, 1)


def _hidden_of_layers(
    mask: Mask | None, query: Tensor, k_len: int, causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the hidden keys of queries that see other keys, and the queries that see no key; None: there are no such.

    Where launches count, all layers that are called with one mask share them.
    """
    q_len, shares = query.shape[2], policy.saves_launches(query.device) and not modes.is_compiled()
    asked = (mask, key_of_layers(mask, query, k_len, causal)) if mask is not None and shares else None
    if asked is not None:
        held: tuple[object, tuple[Tensor, Tensor | None]] | None = asked[0].__dict__.get("_of_relative_layers")
        if held is not None and held[0] == asked[1]:
            return held[1]
    if mask is None and causal and q_len == 1:  # the last position
        return None, None
    allowed = dense_mask(Causal() & mask if causal else mask, q_len, k_len, query.device, k_len - q_len, query.shape[0])
    if allowed is None:
        return None, None
    some = None if isinstance(mask, NeverEmpty) else allowed.any(dim=-1, keepdim=True)
    found = (~allowed, None) if some is None else (~allowed & some, ~some)
    if asked is not None:
        asked[0].__dict__["_of_relative_layers"] = asked[1], found
    return found


def _by_sdpa(
    content_query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    hidden: Tensor | None,
    empty: Tensor | None,
    dropout_rate: float,
) -> Tensor:
    """Use torch's fused kernel, with the scores of the distances as an additive mask that has a gradient; for CUDA.

    Args: content_query: query + u; scores: of `_scores_of_distances`; hidden, empty: of `_hidden_of_layers`.

    A query without allowed keys attends to all keys, and zeros then replace its result: kernels differ in what they
    return for a row of -inf, and its gradient would be NaN.
    """
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    out = F.scaled_dot_product_attention(
        content_query, key, value, attn_mask=scores.to(content_query.dtype), dropout_p=dropout_rate
    )
    return out if empty is None else out.masked_fill(empty, 0.0)
