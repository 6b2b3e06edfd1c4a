"""The Transformer's encoder alone, and the classifier made of it.

Paper: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.1, the left half of figure 1.
"""

from __future__ import annotations

from torch import Tensor, nn

from manyheads.architectures.transformer.model import Encoder
from manyheads.extras.classification.model import SequenceClassifier, build_classifier_of
from manyheads.extras.classification.transformer_config import TransformerClassifierConfig
from manyheads.nn.attention.masks import Lengths
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.layers import Dropout
from manyheads.nn.positions import TokenEmbedding, positions_of_kind
from manyheads.nn.shapes import Float, Int

__all__ = ["TransformerEncoder", "build_classifier"]


class TransformerEncoder(nn.Module):
    """Token ids to hidden states: embedding, positions, and the encoder-decoder's stack of layers.

    Args: config: sizes and choices; the vocabulary size must be set.
    """

    def __init__(self, config: TransformerClassifierConfig) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(config.vocab_size, config.d_model)
        self.positions = positions_of_kind(config.positions, config.d_model, config.max_len)
        self.dropout = Dropout(config.dropout)
        self.encoder = Encoder(config.stack)

    def forward(
        self, tokens: Int[Tensor, "batch len"], lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch len d_model"]:
        """Return the states. Rows are padded on the right; states at padding are undefined."""
        x = self.dropout(low_precision(self.positions(self.embedding(tokens))))
        return self.encoder(x, Lengths(lengths))  # type: ignore[no-any-return]


def build_classifier(config: TransformerClassifierConfig) -> SequenceClassifier:
    """See `build_classifier_of`."""
    return build_classifier_of(TransformerEncoder, config, config.d_model)
