"""The Transformer's encoder over words, and the chart parser made of it.

Paper: Kitaev and Klein 2018, arXiv:1805.01052. Differs: see `TransformerSpanParserConfig` and `span_head`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.architectures.transformer.model import Encoder
from manyheads.extras.parsing.span_head import SpanHead
from manyheads.extras.parsing.span_parser import SpanParser, check_labels_and_tags
from manyheads.extras.parsing.transformer_config import TransformerSpanParserConfig
from manyheads.nn.attention.masks import Lengths
from manyheads.nn.dropout import Dropout
from manyheads.nn.embedding import FeatureEmbedding
from manyheads.nn.positions import LearnedPositions
from manyheads.nn.precision import low_precision
from manyheads.nn.shapes import Float, Int

__all__ = ["WordEncoder", "build_span_parser"]

_WORD, _BEGIN, _END = range(3)


class WordEncoder(nn.Module):
    """Features of words to states of begin, words and end.

    The vector of a word is the sum of the vectors of its features: subwords and hashes. In training each feature is
    left out with the probability `feature_dropout`, so that the model learns to read words it does not know.

    Args: config: sizes and choices; the vocabulary size must be set.
    """

    traced_parts: ClassVar = {
        "word_norm": ("normalised words", "LN(x)"),
        "window_proj": ("windows", "[.., x_(i-1), x_i, x_(i+1), ..] W + b; max(0, windows) is added to x"),
    }

    def __init__(self, config: TransformerSpanParserConfig) -> None:
        super().__init__()
        self.config = config
        rate = config.feature_dropout
        self.piece_embedding = FeatureEmbedding(config.vocab_size + 1, config.d_model, dropout=rate)
        self.affix_embedding = FeatureEmbedding(config.num_affixes + 1, config.d_model, dropout=rate)
        self.boundary_embedding = FeatureEmbedding(3, config.d_model, none=None)
        self.word_norm = nn.LayerNorm(config.d_model)
        wide = config.window * config.d_model
        self.window_proj = nn.Linear(wide, config.d_model) if config.window > 1 else None
        self.positions = LearnedPositions(config.d_model, max_len=config.max_len + 2)
        self.dropout = Dropout(config.dropout)
        self.encoder = Encoder(config.stack)

    def forward(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch words+2 d_model"]:
        """Return the states; see `SpanBatch`. Those of padding are undefined."""
        # A hash of 0 is no feature; the others share the rows of the table.
        affixes = torch.where(affixes > 0, affixes % self.config.num_affixes + 1, 0)
        words = self.piece_embedding(pieces) + self.affix_embedding(affixes)
        places = torch.arange(pieces.shape[1] + 2, device=pieces.device)
        kinds = torch.where(places == lengths[:, None] + 1, _END, _WORD)
        kinds[:, 0] = _BEGIN
        words = F.pad(words, (0, 0, 1, 1)).masked_fill((places > lengths[:, None])[:, :, None], 0.0)
        x = self.word_norm(words + self.boundary_embedding(kinds[:, :, None]))
        if self.window_proj is not None:
            x = x + self._of_neighbours(x, places < lengths[:, None] + 2, self.window_proj)
        x = self.dropout(low_precision(self.positions(x)))
        return self.encoder(x, Lengths(lengths + 2))  # type: ignore[no-any-return]

    def _of_neighbours(self, x: Tensor, real: Tensor, proj: nn.Linear) -> Tensor:
        """A layer over a window of words around each; with few trees, attention learns late to use the neighbours of a
        word."""
        num_places, side = x.shape[1], self.config.window // 2
        padded = F.pad(self.dropout(x).masked_fill(~real[:, :, None], 0.0), (0, 0, side, side))
        windows = torch.cat([padded[:, first : first + num_places] for first in range(2 * side + 1)], dim=-1)
        return F.relu(proj(windows))


def build_span_parser(config: TransformerSpanParserConfig) -> SpanParser:
    """Return body and head, with random weights. Raises: ConfigError: see `check_labels_and_tags`."""
    check_labels_and_tags(config)
    head = SpanHead(
        config.d_model, config.span_dim, len(config.constituents), len(config.tags), dropout=config.span_dropout
    )
    return SpanParser(WordEncoder(config), head, config)
