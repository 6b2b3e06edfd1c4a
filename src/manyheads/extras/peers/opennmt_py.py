"""Transformers of OpenNMT-py 3: one checkpoint with the weights and the options of its training.

Differs from our defaults: norms have epsilon 1e-6 and stand before sublayers; attention has no biases by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.errors import ModelFileError
from manyheads.extras.peers.layout import Layout
from manyheads.extras.peers.peer import Options
from manyheads.extras.peers.plain_transformer import PlainTransformer, is_formula, tie_of

__all__ = ["OpenNMT"]

_EMBEDDING = "{side}.embeddings.make_embedding.emb_luts.0.weight"
_POSITIONS = "{side}.embeddings.make_embedding.pe.pe"


class OpenNMT(PlainTransformer):
    """A config holds the options of the training, `opt` in the checkpoint, under `model`."""

    name = "OpenNMT-py"
    kinds = ("opennmt_py",)
    options: ClassVar[Options] = {
        "enc_layers": int,
        "dec_layers": int,
        "enc_hid_size": int,
        "dec_hid_size": int,
        "heads": 8,
        "transformer_ff": 2048,
        "pos_ffn_activation_fn": "relu",
        "norm_eps": 1e-6,
        "position_encoding": False,
        "share_embeddings": False,
        "share_decoder_embeddings": False,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "encoder_type": ("transformer",),
        "decoder_type": ("transformer",),
        "model_task": ("seq2seq",),
        "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
        "max_relative_positions": (0,),
        "relative_positions_buckets": (0,),
        "num_kv": (0,),
        "parallel_residual": (False,),
        "layer_norm": ("standard",),
        "num_experts": (0,),
        "sliding_window": (0,),
        "copy_attn": (False,),
        "coverage_attn": (False,),
        "generator_function": ("softmax",),
        "lora_layers": ([],),
        "lora_embedding": (False,),
        "quant_layers": ([],),
    }
    layout: ClassVar[Layout] = {
        _EMBEDDING.format(side="encoder"): "body.source_embedding.weight",
        _EMBEDDING.format(side="decoder"): "body.target_embedding.weight",
        _POSITIONS.format(side="encoder"): "body.source_positions.weight",
        _POSITIONS.format(side="decoder"): "body.target_positions.weight",
        "encoder.transformer.*.self_attn.linear_{query,keys,values}.*": (
            "body.encoder.layers.*.self_attn.{q,k,v}_proj.*"
        ),
        "encoder.transformer.*.self_attn.final_linear.*": "body.encoder.layers.*.self_attn.out_proj.*",
        "encoder.transformer.*.layer_norm.*": "body.encoder.layers.*.self_attn_residual.norm.*",
        "encoder.transformer.*.feed_forward.layer_norm.*": "body.encoder.layers.*.feed_forward_residual.norm.*",
        "encoder.transformer.*.feed_forward.w_{1,2}.*": "body.encoder.layers.*.feed_forward.{in,out}_proj.*",
        "decoder.transformer_layers.*.{self,context}_attn.linear_query.*": (
            "body.decoder.layers.*.{self,cross}_attn.q_proj.*"
        ),
        "decoder.transformer_layers.*.{self,context}_attn.linear_keys.*": (
            "body.decoder.layers.*.{self,cross}_attn.k_proj.*"
        ),
        "decoder.transformer_layers.*.{self,context}_attn.linear_values.*": (
            "body.decoder.layers.*.{self,cross}_attn.v_proj.*"
        ),
        "decoder.transformer_layers.*.{self,context}_attn.final_linear.*": (
            "body.decoder.layers.*.{self,cross}_attn.out_proj.*"
        ),
        "decoder.transformer_layers.*.layer_norm_{1,2}.*": "body.decoder.layers.*.{self,cross}_attn_residual.norm.*",
        "decoder.transformer_layers.*.feed_forward.layer_norm.*": "body.decoder.layers.*.feed_forward_residual.norm.*",
        "decoder.transformer_layers.*.feed_forward.w_{1,2}.*": "body.decoder.layers.*.feed_forward.{in,out}_proj.*",
        "*.layer_norm.*": "body.*.norm.*",
        "generator.*": "head.*",
    }

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerConfig:
        source, target = cls.vocab_sizes(weights, *(_EMBEDDING.format(side=side) for side in ("encoder", "decoder")))
        d_model = cls.equal_of(options, "enc_hid_size", "dec_hid_size")
        positions = weights.get(_POSITIONS.format(side="encoder"))
        if not options["position_encoding"] or positions is None:
            raise ModelFileError("position_encoding is off, so the model has no positions; our model always has them.")
        formula = positions.dim() == 3 and is_formula(positions[:, 0], d_model)
        return TransformerConfig(
            source_vocab_size=source,
            target_vocab_size=target,
            d_model=d_model,
            num_heads=options["heads"],
            d_ff=options["transformer_ff"],
            num_encoder_layers=options["enc_layers"],
            num_decoder_layers=options["dec_layers"],
            activation=cls.activation_of(options["pos_ffn_activation_fn"]),
            norm_position="pre",
            norm_eps=options["norm_eps"],
            positions="sinusoidal" if formula else "learned",
            max_len=positions.shape[0],
            tie_embeddings=tie_of(embeddings=options["share_embeddings"], output=options["share_decoder_embeddings"]),
            head_bias=True,
        )

    @classmethod
    def prepare(cls, weights: Mapping[str, Tensor], module: Seq2Seq) -> dict[str, Tensor]:
        """See `Peer.prepare`. A missing bias is zero; positions by another formula are a table."""
        prepared = {name: tensor for name, tensor in weights.items() if not name.endswith(".pe.pe")}
        if module.config.positions == "learned":
            tables = {_POSITIONS.format(side=side) for side in ("encoder", "decoder")}
            prepared |= {name: weights[name][:, 0] for name in tables if name in weights}
        for name in list(prepared):
            bias = name.removesuffix("weight") + "bias"
            if name.endswith(".weight") and (".linear_" in name or ".final_linear." in name or ".w_" in name):
                prepared.setdefault(bias, torch.zeros(prepared[name].shape[0]))
        return prepared
