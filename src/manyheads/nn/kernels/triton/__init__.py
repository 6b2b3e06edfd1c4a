"""Kernels in Triton, which is optional: `policy` says where they are used (decision 071).

The functions here can be imported without Triton; they check what is given, and pack it for the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.errors import RequestError, ShapeError
from manyheads.nn.attention.masks import Mask, dense_mask
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.attention import check_distances

if TYPE_CHECKING:
    from manyheads.nn.shapes import Float, Int


def _rows_in_memory(x: Tensor) -> Tensor:
    """Return x, copied if the numbers of its last axis are not adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _packed(x: Tensor) -> Tensor:
    """(batch, heads, len, width) -> (batch x len, heads, width), a view where the length comes before the heads."""
    return _rows_in_memory(x.transpose(1, 2).flatten(0, 1))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, content_bias: Tensor, position_bias: Tensor | None,
    distance_bias: Tensor | None, allowed: Tensor | None, *lanes: Any,
) -> Tensor:  # fmt: skip
    """Compute the scores by distance with torch, and the rest with the kernels, for packed rows.

    Args: lanes: the fields of `triton.relative.Lanes`.
    """
    lack = policy.triton_lack(query.device, query.dtype, max(query.shape[-1], value.shape[-1]))
    if lack is not None:
        raise RequestError(f"Fused relative attention {lack}")
    dtype = query.dtype
    content_query = query + content_bias.to(dtype)
    position_query = query if position_bias is None else query + position_bias.to(dtype)
    with torch.autocast(query.device.type, enabled=False):
        by_distance = torch.bmm(position_query.transpose(0, 1), positions.to(dtype).transpose(1, 2))
    bias = None if distance_bias is None else distance_bias.contiguous()
    key, value = (_rows_in_memory(x.to(dtype)) for x in (key, value))
    given = (_rows_in_memory(content_query), key, value, by_distance.contiguous(), bias, allowed)
    from manyheads.nn.kernels.triton.relative import FusedAttention, Lanes

    out: Tensor = FusedAttention.apply(*given, Lanes(*lanes))
    return out


def fused_relative_attention(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    value: Float[Tensor, "batch heads k_len value_dim"],
    positions: Float[Tensor, "heads num_distances head_dim"],
    content_bias: Float[Tensor, "heads head_dim"],
    position_bias: Float[Tensor, "heads head_dim"] | None = None,
    distance_bias: Float[Tensor, "heads num_distances"] | None = None,
    mask: Mask | None = None,
    causal: bool = True,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Return the result of Transformer-XL's attention, from Triton kernels; first derivatives only.

        >>> heads, distances, u = torch.randn(1, 2, 3, 16), torch.randn(2, 3, 16), torch.zeros(2, 16)
        >>> fused_relative_attention(heads, heads, heads, distances, u)  # on a CPU
        Traceback (most recent call last):
        ...
        manyheads.errors.RequestError: Fused relative attention needs ...

    Paper: Dai et al. 2019, sec. 3.3. Arguments: see `relative_attention`; there is no dropout of weights.
    Raises: RequestError: Triton is missing, or the kernels lack the device, dtype or head width; ShapeError: as
        `relative_attention`.
    Cost: memory for one number per head, query and distance, and in the backward pass for their gradients.
    """
    batch, _, q_len, _ = query.shape
    k_len = key.shape[2]
    check_distances(q_len, k_len, positions.shape[1], causal)
    allowed = dense_mask(mask, q_len, k_len, query.device, k_len - q_len, batch)
    if allowed is not None:
        allowed = allowed.expand(batch, query.shape[1], q_len, k_len)
    parts = (positions, content_bias, position_bias, distance_bias, allowed)
    out = _attend(_packed(query), _packed(key), _packed(value), *parts, batch, q_len, k_len, k_len - 1, causal)
    return out.view(batch, q_len, *out.shape[1:]).transpose(1, 2)


def fused_relative_attention_of_segments(
    query: Float[Tensor, "q_tokens heads head_dim"],
    key: Float[Tensor, "k_tokens heads head_dim"],
    value: Float[Tensor, "k_tokens heads value_dim"],
    positions: Float[Tensor, "heads num_distances head_dim"],
    content_bias: Float[Tensor, "heads head_dim"],
    position_bias: Float[Tensor, "heads head_dim"] | None,
    distance_bias: Float[Tensor, "heads num_distances"] | None,
    cu_seqlens_q: Int[Tensor, " segments_and_one"],
    cu_seqlens_k: Int[Tensor, " segments_and_one"],
    max_q: int,
    max_k: int,
    causal: bool = True,
) -> Float[Tensor, "q_tokens heads value_dim"]:
    """Do the same as `fused_relative_attention` for segments that lie one after another, without padding.

        >>> rows, distances, u = torch.randn(5, 2, 16), torch.randn(2, 3, 16), torch.zeros(2, 16)
        >>> starts = torch.tensor([0, 3, 5])  # segments of three and two tokens
        >>> fused_relative_attention_of_segments(rows, rows, rows, distances, u, None, None, starts, starts, 3, 3)
        Traceback (most recent call last):
        ...
        manyheads.errors.RequestError: Fused relative attention needs ...

    Args:
        positions: the first row is r of distance max_k - 1. There are max_k rows if causal, else max_k + max_q - 1.
        cu_seqlens_q, cu_seqlens_k: where each segment's queries and keys begin, and the last end. A segment's queries
            are the last of its keys.
        max_q, max_k: upper bounds of the segments' lengths. On a GPU they are not checked, because the host would wait:
            in a longer segment queries and distances are left out, and gradients are wrong. Nor are the ends.

    Returns: zeros for queries that belong to no segment.
    Raises: as `fused_relative_attention`.
    """
    check_distances(max_q, max_k, positions.shape[1], causal)
    starts = [x.to(torch.int32) for x in (cu_seqlens_q, cu_seqlens_k)]
    if starts[0].shape != starts[1].shape or not starts[0].numel():
        raise ShapeError(
            f"cu_seqlens_q and cu_seqlens_k have shapes {tuple(starts[0].shape)} and {tuple(starts[1].shape)}; give"
            " both one number more than there are segments."
        )
    if policy.can_look(query):
        for name, one, most, rows in zip("qk", starts, (max_q, max_k), (len(query), len(key)), strict=True):
            longest = int(one.diff().max()) if one.numel() > 1 else 0
            if longest > most:
                raise ShapeError(f"a segment has length {longest}, which is more than max_{name} {most}; give more.")
            if (end := int(one[-1])) > rows:
                raise ShapeError(f"cu_seqlens_{name} ends at {end}, but there are {rows} rows; give as many.")
    parts = (positions, content_bias, position_bias, distance_bias, None)
    return _attend(query, key, value, *parts, len(starts[0]) - 1, max_q, max_k, max_k - 1, causal, *starts)
