"""The Reformers as composites."""

from __future__ import annotations

from manyheads.models.language_model import LanguageModel
from manyheads.models.reformer.config import ReformerConfig, ReformerSeq2SeqConfig
from manyheads.models.reformer.model import Reformer
from manyheads.models.reformer.translator import ReformerTranslator
from manyheads.models.seq2seq import Seq2Seq
from manyheads.nn.heads.linear import LinearHead


def build(config: ReformerConfig) -> LanguageModel:
    """Return the language model's body and head, with random weights. The body returns both residual streams."""
    head = LinearHead(2 * config.d_model, config.vocab_size, bias=True)
    return LanguageModel(Reformer(config), head, config)


def build_seq2seq(config: ReformerSeq2SeqConfig) -> Seq2Seq:
    """Return the encoder-decoder's body and head, with random weights."""
    head = LinearHead(config.d_model, config.target_vocab_size)
    return Seq2Seq(ReformerTranslator(config), head, config)
