"""The table of architectures: a new one needs one folder and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

from torch import nn

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.reformer.config import ReformerConfig, ReformerSeq2SeqConfig
from manyheads.architectures.reformer.model import Reformer
from manyheads.architectures.reformer.presets import PRESETS as REFORMER_PRESETS
from manyheads.architectures.reformer.presets import SEQ2SEQ_PRESETS
from manyheads.architectures.reformer.translator import ReformerTranslator
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.architectures.transformer.model import Transformer
from manyheads.architectures.transformer.presets import PRESETS as TRANSFORMER_PRESETS
from manyheads.architectures.transformer_xl.config import TransformerXLConfig
from manyheads.architectures.transformer_xl.model import TransformerXL
from manyheads.architectures.transformer_xl.presets import PRESETS as XL_PRESETS
from manyheads.errors import ConfigError
from manyheads.nn.heads.adaptive import AdaptiveHead
from manyheads.nn.heads.linear import LinearHead

__all__ = ["ARCHITECTURES", "Architecture", "build_model"]


@dataclass(frozen=True)
class Architecture:
    """One line of the table.

    task: determines the composite: `Seq2Seq` or `LanguageModel`. config: its config class. build: config -> composite.
    presets: name -> config.
    """

    task: Literal["translation", "language-modelling"]
    config: type
    build: Callable[[Any], nn.Module]
    presets: dict[str, Callable[[], Any]]


def _build_transformer(config: TransformerConfig) -> Seq2Seq:
    head = LinearHead(config.d_model, config.target_vocab_size, bias=config.head_bias)
    return Seq2Seq(Transformer(config), head, config)


def _build_transformer_xl(config: TransformerXLConfig) -> LanguageModel:
    body = TransformerXL(config)
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
    return LanguageModel(body, head, config)


def _build_reformer(config: ReformerConfig) -> LanguageModel:
    head = LinearHead(2 * config.d_model, config.vocab_size, bias=True)
    return LanguageModel(Reformer(config), head, config)


def _build_reformer_seq2seq(config: ReformerSeq2SeqConfig) -> Seq2Seq:
    head = LinearHead(config.d_model, config.target_vocab_size)
    return Seq2Seq(ReformerTranslator(config), head, config)


ARCHITECTURES: dict[str, Architecture] = {
    "reformer": Architecture("language-modelling", ReformerConfig, _build_reformer, REFORMER_PRESETS),
    "reformer-seq2seq": Architecture("translation", ReformerSeq2SeqConfig, _build_reformer_seq2seq, SEQ2SEQ_PRESETS),
    "transformer": Architecture("translation", TransformerConfig, _build_transformer, TRANSFORMER_PRESETS),
    "transformer-xl": Architecture("language-modelling", TransformerXLConfig, _build_transformer_xl, XL_PRESETS),
}


@overload
def build_model(config: TransformerConfig | ReformerSeq2SeqConfig) -> Seq2Seq: ...
@overload
def build_model(config: TransformerXLConfig | ReformerConfig) -> LanguageModel: ...
def build_model(
    config: TransformerConfig | TransformerXLConfig | ReformerConfig | ReformerSeq2SeqConfig,
) -> Seq2Seq | LanguageModel:
    """Return a new composite with random weights (from torch's global generator).

    Raises: ConfigError: the architecture is unknown, or the config cannot be built.
    """
    if config.architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {config.architecture!r} is unknown; there are {sorted(ARCHITECTURES)}.")
    return ARCHITECTURES[config.architecture].build(config)  # type: ignore[return-value]
