"""Attention in one head, as modules: scaled dot products and additive scores.

Papers: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.1, eq. 1: softmax(Q K^T / sqrt(d_k)) V; Bahdanau et al. 2015,
arXiv:1409.0473.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.errors import ShapeError
from manyheads.nn.kernels.attention import dot_product_attention, dot_product_weights, masked_weights
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.layers import Linear, initialise
from manyheads.nn.shapes import Float, check_rates, check_sizes, check_vectors, explained

if TYPE_CHECKING:
    from manyheads.nn.attention.masks import Mask


def one_head(x: Float[Tensor, "*batch length width"]) -> Float[Tensor, "rows 1 length width"]:
    """Return vectors with a head axis; vectors without a batch axis become a batch of one.

    Raises: ShapeError: x has neither two nor three axes.
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
        scale: factor of the scores; None: 1 / sqrt(width of a query).
    """

    def __init__(self, *, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        check_rates(dropout=dropout)
        self.dropout_rate = dropout
        self.scale = scale

    @explained
    def forward(
        self,
        query: Float[Tensor, "*batch q_len width"],
        key: Float[Tensor, "*batch k_len width"],
        value: Float[Tensor, "*batch k_len value_dim"],
        *,
        mask: Mask | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the weighted sums of the values, (batch, q_len, value_dim).

        Args: mask: the keys that each query may attend to; None: all. need_weights: also return the weights before
            dropout, (batch, q_len, k_len). Inputs and results either all have a batch axis, or none.

        Raises: ShapeError: the query has neither two nor three axes; keys and values have others, or differ in number.
        """
        check_vectors(query, key, value)
        q, k, v = (one_head(x) for x in (query, key, value))
        rate = self.dropout_rate if self.training else 0.0
        if not need_weights:
            return dot_product_attention(q, k, v, mask, rate, self.scale).view(*query.shape[:-1], value.shape[-1])
        weights = dot_product_weights(q, k, mask, self.scale)
        out = torch.matmul(dropout(weights, rate), v)
        out = out.view(*query.shape[:-1], value.shape[-1])
        return out, weights.view(*query.shape[:-1], key.shape[-2])


class AdditiveAttention(nn.Module):
    """Attention in one head by w_v . tanh(W_q q + W_k k); queries, keys and values of any three widths.

        >>> attention = AdditiveAttention(query_dim=20, key_dim=2, hidden_dim=8)
        >>> query, key, value = torch.randn(2, 1, 20), torch.randn(2, 10, 2), torch.randn(2, 10, 4)
        >>> from manyheads.nn import Lengths
        >>> out, weights = attention(query, key, value, mask=Lengths(torch.tensor([2, 6])), need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 1, 4]), torch.Size([2, 1, 10]))

    Paper: Bahdanau et al. 2015, arXiv:1409.0473, appendix A.1.2. Symbols: W_a = q_proj, U_a = k_proj, v_a =
        score_proj.
    Args:
        query_dim, key_dim: widths of queries and keys.
        hidden_dim: width of the tanh layer.
        dropout: rate on the weights, in training.

    Cost: O(q_len x k_len x hidden_dim) memory.
    """

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        check_sizes(query_dim=query_dim, key_dim=key_dim, hidden_dim=hidden_dim)
        check_rates(dropout=dropout)
        self.q_proj = Linear(query_dim, hidden_dim, bias=False)
        self.k_proj = Linear(key_dim, hidden_dim, bias=False)
        self.score_proj = Linear(hidden_dim, 1, bias=False)
        self.dropout_rate = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform."""
        initialise(self.q_proj, self.k_proj, self.score_proj)

    @explained
    def forward(
        self,
        query: Float[Tensor, "*batch q_len query_dim"],
        key: Float[Tensor, "*batch k_len key_dim"],
        value: Float[Tensor, "*batch k_len value_dim"],
        *,
        mask: Mask | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the weighted sums of the values, (batch, q_len, value_dim); arguments as `DotProductAttention`.

        Raises: ShapeError: the query has neither two nor three axes, or keys and values have others.
        """
        check_vectors(query, key, value)
        q, k, v = (one_head(x) for x in (query, key, value))  # (batch, 1, length, width)
        hidden = torch.tanh(self.q_proj(q)[..., :, None, :] + self.k_proj(k)[..., None, :, :])
        weights = masked_weights(self.score_proj(hidden).squeeze(-1), mask)  # (batch, 1, q_len, k_len)
        out = torch.matmul(dropout(weights, self.dropout_rate if self.training else 0.0), v)
        out = out.view(*query.shape[:-1], value.shape[-1])
        return (out, weights.view(*query.shape[:-1], key.shape[-2])) if need_weights else out
