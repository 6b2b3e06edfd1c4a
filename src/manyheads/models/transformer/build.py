"""The Transformer as a composite."""

from __future__ import annotations

from torch import nn

from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer.model import Transformer
from manyheads.nn.heads.linear import LinearHead


def build(config: TransformerConfig) -> Seq2Seq:
    """Return body and head, with random weights."""
    head = LinearHead(config.d_model, config.target_vocab_size, bias=config.head_bias)
    model = Seq2Seq(Transformer(config), head, config)
    if config.initialisation == "glorot":
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
    return model
