"""Token embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.nn.shapes import Float, Int

__all__ = ["FeatureEmbedding", "TokenEmbedding"]


class TokenEmbedding(nn.Embedding):
    """A table of vectors, which are scaled so that position encodings are not much larger than they are.

    Paper: Vaswani et al. 2017, sec. 3.4: the weights are multiplied by sqrt(d_model).
    Args:
        vocab_size: rows.
        d_model: width.
        scale: multiply by sqrt(d_model).

    The table is initialised with N(0, 1 / d_model), so the output has variance 1 with the scale, and the initial logits
    of a head that shares the table have variance near 1.
    """

    def __init__(self, vocab_size: int, d_model: int, *, scale: bool = True) -> None:
        self.scale = math.sqrt(d_model) if scale else 1.0
        super().__init__(vocab_size, d_model)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    @property
    def token_table(self) -> Tensor:
        """The weights, (ids, width): by this name the input and the output of every model are found."""
        return self.weight

    def facts(self) -> tuple[str, ...]:
        """Return what drawings show of the module: its name, and lines with its sizes."""
        scale = f", times √{self.embedding_dim:,}" if self.scale != 1.0 else ""
        return "Embedding", f"{self.num_embeddings:,} tokens x {self.embedding_dim:,}{scale}"

    def equation(self) -> tuple[str, str]:
        """Return the name and the equation of the output, for tables of a model's tensors."""
        return "embedded", "√d_model · E[ids]" if self.scale != 1.0 else "E[ids]"

    def forward(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length d_model"]:
        return super().forward(ids) * self.scale


class FeatureEmbedding(nn.Embedding):
    """The sum of the vectors of each position's features, such as the subwords and endings of a word.

        >>> FeatureEmbedding(100, 16)(torch.randint(100, (2, 5, 3))).shape
        torch.Size([2, 5, 16])

    Args:
        num_features: rows.
        d_model: width.
        none: the id that stands for no feature; None: every id is one.
        dropout: probability that a feature is not read in training; for tables in which 0 is no feature.
    """

    def __init__(self, num_features: int, d_model: int, *, none: int | None = 0, dropout: float = 0.0) -> None:
        super().__init__(num_features, d_model)
        self.none = none
        self.dropout = dropout

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.05)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        return "Sum of features", f"{self.num_embeddings:,} features x {self.embedding_dim:,}"

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        return "sum of features", "Σ E[f], f the features of a position"

    def forward(self, ids: Int[Tensor, "batch length features"]) -> Float[Tensor, "batch length d_model"]:
        if self.training and self.dropout:
            ids = ids * (torch.rand(ids.shape, device=ids.device) >= self.dropout)
        summed = F.embedding_bag(ids.flatten(0, 1), self.weight, mode="sum", padding_idx=self.none)
        return summed.view(*ids.shape[:2], -1)
