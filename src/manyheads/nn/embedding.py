"""Token embeddings."""

from __future__ import annotations

import math

from torch import Tensor, nn

from manyheads.nn.shapes import Float, Int

__all__ = ["TokenEmbedding"]


class TokenEmbedding(nn.Embedding):
    """A table of vectors, scaled so that positions do not dominate them.

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

    def forward(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length d_model"]:
        return super().forward(ids) * self.scale
