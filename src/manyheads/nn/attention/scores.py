"""Scores of queries and keys that replace scaled dot products in every head.

Paper: Bahdanau et al. 2015, arXiv:1409.0473. Attention in one head is in `extras.peers.one_head`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from manyheads.nn.shapes import Float, check_sizes, explained


class AdditiveScore(nn.Module):
    """score(q, k) = w_v . tanh(W_q q + W_k k), for `MultiHeadAttention`.

        >>> from manyheads.nn import MultiHeadAttention
        >>> attention = MultiHeadAttention(16, 2, score=AdditiveScore(num_heads=2, head_dim=8))
        >>> attention(torch.randn(3, 5, 16))[0].shape
        torch.Size([3, 5, 16])

    Paper: Bahdanau et al. 2015, arXiv:1409.0473, appendix A.1.2. Differs: without biases.
    Args:
        num_heads: number of heads, each with its own weights.
        head_dim: width of query and key in a head.
        hidden_dim: width of the tanh layer; 0: head_dim.
    Cost: O(q_len x k_len x hidden_dim) memory.
    """

    without_decay: tuple[str, ...] = ("score_weight",)
    formula = "wᵀ tanh(Wq q + Wk k)"

    def __init__(self, num_heads: int, head_dim: int, hidden_dim: int = 0) -> None:
        super().__init__()
        hidden_dim = hidden_dim or head_dim
        check_sizes(num_heads=num_heads, head_dim=head_dim, hidden_dim=hidden_dim)
        self.query_weight = nn.Parameter(torch.empty(num_heads, head_dim, hidden_dim))
        self.key_weight = nn.Parameter(torch.empty(num_heads, head_dim, hidden_dim))
        self.score_weight = nn.Parameter(torch.empty(num_heads, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.query_weight, self.key_weight):
            bound = math.sqrt(6 / (weight.shape[1] + weight.shape[2]))
            nn.init.uniform_(weight, -bound, bound)
        bound = math.sqrt(6 / (self.score_weight.shape[1] + 1))
        nn.init.uniform_(self.score_weight, -bound, bound)

    @explained
    def forward(
        self, query: Float[Tensor, "batch heads q_len head_dim"], key: Float[Tensor, "batch heads k_len head_dim"]
    ) -> Float[Tensor, "batch heads q_len k_len"]:
        q = torch.einsum("bhqd,hde->bhqe", query, self.query_weight)
        k = torch.einsum("bhkd,hde->bhke", key, self.key_weight)
        hidden = torch.tanh(q[:, :, :, None] + k[:, :, None])  # (batch, heads, q_len, k_len, hidden_dim)
        return torch.einsum("bhqke,he->bhqk", hidden, self.score_weight)
