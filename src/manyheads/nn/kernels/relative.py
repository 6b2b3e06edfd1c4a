"""Attention with relative positions: one formula, and fast implementations of it.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 3.3. The score of query i and key j is

    ((q_i + u) . k_j + (q_i + v) . r_(i - j)) / sqrt(head_dim)

where q and k are projections of hidden states, r is a projection of the encoding of a distance, and u and v are
trained. `relative_weights` is this formula. `relative_attention` computes it with the implementation that `policy`
selects.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import ShapeError
from manyheads.nn.attention.masks import Causal, Mask, dense_mask
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.kernels.relative_tiles import attend_by_tiles
from manyheads.nn.kernels.softmax import masked_softmax, weighted_by_sums
from manyheads.nn.shapes import Float


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
    _check(query, key, positions, causal)
    q_len, k_len = query.shape[2], key.shape[2]
    content = torch.matmul(query + content_bias[:, None].to(query.dtype), key.transpose(-1, -2))
    position_query = query if position_bias is None else query + position_bias[:, None].to(query.dtype)
    by_distance = torch.matmul(position_query, positions.transpose(-1, -2))
    if distance_bias is not None:
        by_distance = by_distance + distance_bias[:, None].to(by_distance.dtype)
    by_position = relative_shift(by_distance) if causal else relative_shift_both_ways(by_distance)
    scores = (content + by_position) / math.sqrt(query.shape[-1])
    allowed = dense_mask(Causal() & mask if causal else mask, q_len, k_len, query.device, k_len - q_len)
    return masked_softmax(scores, allowed)


def relative_shift(x: Float[Tensor, "*batch q_len k_len"]) -> Float[Tensor, "*batch q_len k_len"]:
    """Move row i to the left by q_len - 1 - i columns, with one pad and one view.

        >>> relative_shift(torch.tensor([[2.0, 1, 0], [2, 1, 0]])).tolist()  # distances for the last two of three keys
        [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0]]

    Paper: Dai et al. 2019, appendix B. Input: column t has the score of distance k_len - 1 - t. Output: column j has
    the score of key j; the queries are the last q_len of the k_len positions. The last columns of a row then contain
    numbers of the next row. They belong to keys after the query, which a causal mask hides.
    """
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

    Returns: zeros for a query that may not attend to any key.
    Raises: ShapeError: causal with more queries than keys, or the number of rows of `positions` is wrong.
    Cost: for the backward pass one number per head, query and key, and one more with dropout; several in both
        directions and on GPUs. Without gradients none. Never (q_len, k_len, head_dim) numbers.
    """
    _check(query, key, positions, causal)
    q_len, k_len = query.shape[2], key.shape[2]
    path = policy.relative_path(query, causal) if q_len else "products"
    if path == "sums":
        return _by_sums(query, key, value, positions, content_bias, position_bias, distance_bias, mask)
    if path == "sdpa":
        by_distance = _scores_of_distances(query, positions, position_bias, distance_bias)
        content_query = query + content_bias[:, None].to(query.dtype)
        allowed = dense_mask(Causal() & mask if causal else mask, q_len, k_len, query.device, k_len - q_len)
        return _by_sdpa(content_query, key, value, by_distance, allowed, dropout_rate, causal)
    if path == "products":
        weights = relative_weights(query, key, positions, content_bias, position_bias, distance_bias, mask, causal)
        return torch.matmul(dropout(weights, dropout_rate), value)
    allowed = dense_mask(Causal() & mask, q_len, k_len, query.device, k_len - q_len)
    assert allowed is not None  # a causal mask never allows everything
    return attend_by_tiles(
        query, key, value, positions, content_bias, position_bias, distance_bias, allowed, dropout_rate
    )


def _check(query: Tensor, key: Tensor, positions: Tensor, causal: bool) -> None:
    q_len, k_len = query.shape[2], key.shape[2]
    if causal and q_len > k_len:
        raise ShapeError(
            f"There are {q_len} queries but only {k_len} keys; in causal attention queries are the last of the keys."
        )
    if causal and positions.shape[1] != k_len:
        raise ShapeError(f"There are {positions.shape[1]} encoded distances for {k_len} keys; give one per key.")
    if not causal and positions.shape[1] != k_len + q_len - 1:
        raise ShapeError(
            f"There are {positions.shape[1]} encoded distances for {q_len} queries and {k_len} keys; attention in both"
            f" directions needs {k_len + q_len - 1}."
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
    allowed = dense_mask(mask, 1, k_len, query.device, k_len - 1)
    return weighted_by_sums(scores, value, allowed).to(query.dtype)


def _scores_of_distances(
    query: Tensor, positions: Tensor, position_bias: Tensor | None, distance_bias: Tensor | None
) -> Tensor:
    """Return the scaled scores of all distances, in the order of `positions`. (batch, heads, q_len, num_distances)"""
    scale = 1 / math.sqrt(query.shape[-1])
    position_query = query if position_bias is None else query + position_bias[:, None].to(query.dtype)
    by_distance = torch.matmul(position_query * scale, positions.transpose(-1, -2))
    if distance_bias is not None:
        by_distance = by_distance + (distance_bias[:, None] * scale).to(by_distance.dtype)
    return by_distance


def _by_sdpa(
    content_query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor,
    allowed: Tensor | None,
    dropout_rate: float,
    causal: bool,
) -> Tensor:
    """Use torch's fused kernel, with the scores of the distances as an additive mask that has a gradient; for CUDA.

    Args: content_query: query + u; by_distance: see `_scores_of_distances`; allowed: True = may attend, causal if
        `causal`.

    A query without allowed keys attends to all keys, and zeros then replace its result: kernels differ in what they
    return for a row of -inf, and its gradient would be NaN.
    """
    scores = relative_shift(by_distance) if causal else relative_shift_both_ways(by_distance)
    some = None
    if allowed is not None:
        some = allowed.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~allowed & some, -math.inf)
    out = F.scaled_dot_product_attention(
        content_query, key, value, attn_mask=scores.to(content_query.dtype), dropout_p=dropout_rate
    )
    return out if some is None else out.masked_fill(~some, 0.0)
