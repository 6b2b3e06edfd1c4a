"""The Transformer-XL as a composite."""

from __future__ import annotations

from torch import nn

from manyheads.models.language_model import LanguageModel
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.models.transformer_xl.model import TransformerXL
from manyheads.nn.heads.adaptive import AdaptiveHead
from manyheads.nn.heads.linear import LinearHead


def build(config: TransformerXLConfig) -> LanguageModel:
    """Return body and head, with random weights. The head clusters the vocabulary if the config has cutoffs."""
    head: LinearHead | AdaptiveHead
    if config.cutoffs or config.has_projections:
        head = AdaptiveHead(
            config.vocab_size,
            config.d_model,
            cutoffs=config.cutoffs,
            d_embed=config.embedding_dim,
            div_value=config.div_value,
        )
    else:
        head = LinearHead(config.d_model, config.vocab_size, bias=True)
        nn.init.normal_(head.weight, std=0.02)
    return LanguageModel(TransformerXL(config), head, config)
