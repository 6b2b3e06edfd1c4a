"""Which architectures there are: a newcomer is one folder and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.architectures.transformer.model import Transformer
from manyheads.architectures.transformer.presets import PRESETS as TRANSFORMER_PRESETS
from manyheads.errors import ConfigError
from manyheads.nn.heads.linear import LinearHead

__all__ = ["ARCHITECTURES", "Architecture", "build_model"]


@dataclass(frozen=True)
class Architecture:
    """One line of the table.

    config: its config class. build: config -> composite. presets: name -> config.
    """

    config: type
    build: Callable[[Any], nn.Module]
    presets: dict[str, Callable[[], Any]]


def _build_transformer(config: TransformerConfig) -> Seq2Seq:
    head = LinearHead(config.d_model, config.target_vocab_size, bias=config.head_bias)
    return Seq2Seq(Transformer(config), head, config)


ARCHITECTURES: dict[str, Architecture] = {
    "transformer": Architecture(config=TransformerConfig, build=_build_transformer, presets=TRANSFORMER_PRESETS),
}


def build_model(config: TransformerConfig) -> Seq2Seq:
    """A fresh composite with random weights (from torch's global generator).

    Raises: ConfigError: the architecture is unknown, or the config cannot be built.
    """
    if config.architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {config.architecture!r} is unknown; there are {sorted(ARCHITECTURES)}.")
    return ARCHITECTURES[config.architecture].build(config)  # type: ignore[return-value]
