"""Pegasus models of `transformers` (PegasusForConditionalGeneration): Marian's computation with pre-norm.

A joint vocabulary, one more norm after each stack; everything else as in `interop.marian`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.errors import ConfigError
from manyheads.extras.peers.holding import Holds
from manyheads.extras.peers.layout import Layout
from manyheads.extras.peers.marian import Marian
from manyheads.extras.peers.peer import Options
from manyheads.nn.positions import sinusoidal_table

__all__ = ["Pegasus"]

_SIDES = ("decoder_vocab_size", "share_encoder_decoder_embeddings")


class Pegasus(Marian):
    """The summarisation model of Zhang et al. 2020, arXiv:1912.08777, whose class holds any pre-norm Transformer."""

    name = "Pegasus"
    kinds = ("hf_pegasus",)
    origin = "transformers[ /]Pegasus"
    model_type = "pegasus"
    model_class = "PegasusForConditionalGeneration"
    holds: ClassVar[Holds] = {**Marian.holds, "norm_position": ("pre",)}
    # The published models have normalize_before and add_final_layer_norm: what this class always does.
    refused = ("normalize_embedding", "tie_encoder_decoder")
    options: ClassVar[Options] = {
        **{name: default for name, default in Marian.options.items() if name not in _SIDES},
        "model_type": "pegasus",
        "vocab_size": 50265,
    }
    special_ids: ClassVar[Mapping[str, int]] = {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "forced_eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    layout: ClassVar[Layout] = {**Marian.layout, "model.*.layer_norm.*": "body.*.norm.*"}

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerConfig:
        sides = {"decoder_vocab_size": None, "share_encoder_decoder_embeddings": True}
        return replace(super().config_of({**options, **sides}, weights), norm_position="pre")

    @classmethod
    def to_peer(cls, module: Seq2Seq) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Marian.to_peer`; always with the tables of positions, which this class expects in the file."""
        config, weights = super().to_peer(module)
        for side in ("encoder", "decoder") if module.config.positions != "learned" else ():
            positions = torch.arange(float(module.config.max_len))
            weights[f"model.{side}.embed_positions.weight"] = sinusoidal_table(
                positions, module.config.d_model, "halves"
            )
        return config, weights

    @classmethod
    def describe(cls, module: Seq2Seq) -> dict[str, Any]:
        tied = module.config.tie_embeddings
        if tied not in ("all", "embeddings"):
            raise ConfigError(
                f"{cls.name} cannot hold a pre-norm model with tie_embeddings {tied!r}; it has one table for both"
                " vocabularies ('all' or 'embeddings'). CTranslate2 and ONNX hold separate ones."
            )
        return {name: value for name, value in super().describe(module).items() if name not in _SIDES}
