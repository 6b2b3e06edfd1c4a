"""Scaled dot-product attention in one head, as a module.

Paper: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.1, eq. 1: softmax(Q K^T / sqrt(d_k)) V.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyheads.errors import ShapeError
from manyheads.nn.attention.masks import Mask
from manyheads.nn.kernels.attention import dot_product_attention, dot_product_weights
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.shapes import Float

__all__ = ["DotProductAttention", "one_head"]


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
        """Return the weighted sums of the values, (batch, q_len, value_dim).

        Args: mask: the keys that each query may attend to; None: all. need_weights: also return the weights before
            dropout, (batch, q_len, k_len). Inputs and results either all have a batch axis, or none.

        Raises: ShapeError: the query has neither two nor three axes; keys and values differ in number.
        """
        q, k, v = (one_head(x) for x in (query, key, value))
        rate = self.dropout_rate if self.training else 0.0
        if not need_weights:
            return dot_product_attention(q, k, v, mask, rate, self.scale).view(*query.shape[:-1], -1)
        weights = dot_product_weights(q, k, mask, self.scale)
        out = torch.matmul(dropout(weights, rate), v)
        return out.view(*query.shape[:-1], -1), weights.view(*query.shape[:-1], -1)
