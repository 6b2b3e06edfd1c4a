"""Scaled dot-product attention: one formula, two ways to compute it.

Paper: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.1, eq. 1: softmax(Q K^T / sqrt(d_k)) V.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import ShapeError
from manyheads.nn.attention.masks import Bias, Causal, Dense, Mask, dense_bias
from manyheads.nn.attention.softmax import masked_softmax, weighted_by_sums
from manyheads.nn.compiling import compiles_a_step
from manyheads.nn.dropout import dropout
from manyheads.nn.linear import onednn_is_faster

__all__ = ["DotProductAttention", "dot_product_attention", "dot_product_weights", "one_head"]

# Longest q_len x k_len for which matrix products may beat SDPA on a CPU, where they can at all: see `_products_pay`.
_SHORT = 128 * 128
# Queries and keys at most, and (batch, head) pairs at least, for which they do in a step of a search.
_FEW_QUERIES, _FEW_KEYS, _MANY_PAIRS = 8, 512, 64
# What numbers of keys are rounded up to where each new one costs a kernel.
_ROUND = 16


def dot_product_attention(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    value: Float[Tensor, "batch heads k_len value_dim"],
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    scale: float | None = None,
    first_query: int = 0,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Weighted sum of the values; the weights are never kept.

        >>> from manyheads.nn import Causal
        >>> q, k, v = torch.randn(3, 2, 8, 5, 64).unbind()
        >>> dot_product_attention(q, k, v, Causal()).shape
        torch.Size([2, 8, 5, 64])

    Args:
        mask: which keys each query may attend to; None is all.
        dropout_rate: on the weights; 0 outside training.
        scale: of the scores; None is 1 / sqrt(head_dim).
        first_query: position of the first query among the keys (the number of cached keys).

    Returns: zeros for a query that may attend to nothing.
    Cost: O(q_len x k_len) time; memory too on the short path, O(q_len + k_len) on SDPA's.
    """
    q_len, k_len = query.shape[2], key.shape[2]
    if compiles_a_step() and query.device.type == "cpu":
        return _by_sums(query, key, value, mask, scale, first_query)
    if _is_part_of_a_cache(query, key, dropout_rate) and _products_pay(query, key, value, 0.0):
        return _over_round_lengths(query, key, value, mask, scale, first_query)
    if not q_len * k_len or _products_pay(query, key, value, dropout_rate):
        weights = dot_product_weights(query, key, mask, scale, first_query)
        return torch.matmul(dropout(weights, dropout_rate), value)
    # SDPA's own causal flag counts from the first key and takes no second mask.
    plain_causal = isinstance(mask, Causal) and first_query == 0 and q_len == k_len
    allowed, bias = (None, None) if plain_causal else dense_bias(mask, q_len, k_len, query.device, first_query)
    given = allowed
    if allowed is not None and bias is not None:
        given = bias.to(query.dtype).masked_fill(~allowed, -math.inf)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=given, dropout_p=dropout_rate, is_causal=plain_causal, scale=scale
    )
    if allowed is not None and (query.device.type != "cpu" or bias is not None):
        # Not every SDPA kernel gives zeros for a fully masked row; ours does, on every device.
        out = out.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)
    return out


def _products_pay(query: Tensor, key: Tensor, value: Tensor, dropout_rate: float) -> bool:
    """Whether plain matrix products are faster than SDPA: on a CPU, at short lengths, in three cases (decision 001).

    With dropout SDPA has no kernel but draws a number for every weight. In 16 bits its backward pass has a cost for
    each (batch, head) pair that sentences never earn back; on processors for which MKL is no help, so has its forward
    pass where there are few queries to a pair, as in a step of a search. In all else it is the faster one.
    """
    q_len, k_len = query.shape[2], key.shape[2]
    if query.device.type != "cpu" or q_len * k_len > _SHORT:
        return False
    if dropout_rate:
        return True
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return query.element_size() < 4
    few = q_len <= _FEW_QUERIES and k_len <= _FEW_KEYS and query.shape[0] * query.shape[1] >= _MANY_PAIRS
    return few and not torch.compiler.is_compiling() and onednn_is_faster()


def _by_sums(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | None, first_query: int
) -> Tensor:
    """`dot_product_attention` for a compiler, in float32 at least: see `weighted_by_sums`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.to(wide)[:, :, :, None] * scale * key.to(wide)[:, :, None]).sum(-1)
    allowed, bias = dense_bias(mask, query.shape[2], key.shape[2], query.device, first_query)
    if bias is not None:
        scores = scores + bias.to(wide)
    return weighted_by_sums(scores, value, allowed).to(query.dtype)


def _is_part_of_a_cache(query: Tensor, key: Tensor, dropout_rate: float) -> bool:
    """Whether these are keys of 16 bits on a CPU that do not lie in one piece, and nobody learns from them."""
    return (
        not dropout_rate
        and key.element_size() < 4
        and key.numel() > 0
        and key.device.type == "cpu"
        and not key.is_contiguous()
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad))
    )


def _over_round_lengths(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | None, first_query: int
) -> Tensor:
    """`dot_product_attention` over copies whose lengths are multiples of 16, with nothing to see behind the end.

    oneDNN copies what does not lie in one piece anyway, keys even turned over, which takes three times as long; and it
    compiles kernels for every number of keys, each of which is half a step of decoding (decision 006).
    """
    q_len, k_len = query.shape[2], key.shape[2]
    allowed, bias = dense_bias(mask, q_len, k_len, query.device, first_query)
    missing = -k_len % _ROUND
    if missing:
        seen = torch.ones(1, 1, dtype=torch.bool, device=key.device) if allowed is None else allowed
        allowed = F.pad(seen.expand(*seen.shape[:-1], k_len), (0, missing))
        bias = None if bias is None else F.pad(bias.expand(*bias.shape[:-1], k_len), (0, missing))
    added = None if bias is None else Bias(bias)
    longer = added if allowed is None else Dense(allowed) & added
    weights = dot_product_weights(query, _lengthened(key, missing), longer, scale)
    return torch.matmul(weights, _lengthened(value, missing))


def _lengthened(x: Tensor, missing: int) -> Tensor:
    """A copy in one piece with so many zeros behind the end. (batch, heads, length, width)"""
    batch, heads, length, width = x.shape
    longer = x.new_empty(batch, heads, length + missing, width)
    longer[:, :, :length] = x
    longer[:, :, length:] = 0
    return longer


def dot_product_weights(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    mask: Mask | None = None,
    scale: float | None = None,
    first_query: int = 0,
) -> Float[Tensor, "batch heads q_len k_len"]:
    """The attention weights themselves, before dropout.

    >>> dot_product_weights(torch.randn(2, 8, 5, 64), torch.randn(2, 8, 7, 64)).shape
    torch.Size([2, 8, 5, 7])
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if key.element_size() < 4 and key.device.type == "cpu":
        # oneDNN wants it in one piece, and would copy it turned over, which takes three times as long.
        key = key.contiguous()
    scores = torch.matmul(query * scale, key.transpose(-1, -2))
    allowed, bias = dense_bias(mask, query.shape[2], key.shape[2], query.device, first_query)
    return masked_softmax(scores if bias is None else scores + bias.to(scores.dtype), allowed)


def one_head(x: Float[Tensor, "*batch length width"]) -> Float[Tensor, "rows 1 length width"]:
    """Vectors as those of one head; no batch is a batch of one.

    Raises: ShapeError: neither two nor three axes.
    """
    if x.dim() not in (2, 3):
        raise ShapeError(
            f"vectors of shape {tuple(x.shape)} have {x.dim()} axes; give (batch, length, width), or (length, width)."
        )
    return x[:, None] if x.dim() == 3 else x[None, None]


class DotProductAttention(nn.Module):
    """Scaled dot-product attention in one head, without parameters.

        >>> attention = DotProductAttention()
        >>> query, key, value = torch.randn(2, 1, 2), torch.randn(2, 10, 2), torch.randn(2, 10, 4)
        >>> from manyheads.nn import Lengths
        >>> out, weights = attention(query, key, value, mask=Lengths(torch.tensor([2, 6])), need_weights=True)
        >>> out.shape, weights[0, 0, 2:].sum().item()
        (torch.Size([2, 1, 4]), 0.0)

    Paper: Vaswani et al. 2017, sec. 3.2.1, eq. 1.
    Args:
        dropout: rate on the weights, in training.
        scale: of the scores; None is 1 / sqrt(width of a query).
    """

    def __init__(self, *, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.dropout_rate = dropout
        self.scale = scale

    def forward(
        self,
        query: Float[Tensor, "*batch q_len width"],
        key: Float[Tensor, "*batch k_len width"],
        value: Float[Tensor, "*batch k_len value_dim"],
        *,
        mask: Mask | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Weighted sums of the values, (batch, q_len, value_dim); if asked for, the weights before dropout,
        (batch, q_len, k_len), as well. All of them without batch, or none.

        Raises: ShapeError: the query has neither two nor three axes.
        """
        q, k, v = (one_head(x) for x in (query, key, value))
        rate = self.dropout_rate if self.training else 0.0
        if not need_weights:
            return dot_product_attention(q, k, v, mask, rate, self.scale).view(*query.shape[:-1], -1)
        weights = dot_product_weights(q, k, mask, self.scale)
        out = torch.matmul(dropout(weights, rate), v)
        return out.view(*query.shape[:-1], -1), weights.view(*query.shape[:-1], -1)
