"""Additive attention scores (Bahdanau et al. 2015), in every head."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["AdditiveScore"]


class AdditiveScore(nn.Module):
    """score(q, k) = w_v . tanh(W_q q + W_k k).

    Paper: Bahdanau et al. 2015, arXiv:1409.0473, appendix A.1.2, without the alignment model's biases.
    Args:
        num_heads: heads, each with maps of its own.
        head_dim: width of a head's query and key.
        hidden_dim: width of the tanh layer; 0 takes head_dim.
    Cost: O(q_len x k_len x hidden_dim) memory.
    """

    def __init__(self, num_heads: int, head_dim: int, hidden_dim: int = 0) -> None:
        super().__init__()
        hidden_dim = hidden_dim or head_dim
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

    def forward(
        self, query: Float[Tensor, "batch heads q_len head_dim"], key: Float[Tensor, "batch heads k_len head_dim"]
    ) -> Float[Tensor, "batch heads q_len k_len"]:
        q = torch.einsum("bhqd,hde->bhqe", query, self.query_weight)
        k = torch.einsum("bhkd,hde->bhke", key, self.key_weight)
        hidden = torch.tanh(q[:, :, :, None] + k[:, :, None])  # (batch, heads, q_len, k_len, hidden_dim)
        return torch.einsum("bhqke,he->bhqk", hidden, self.score_weight)
