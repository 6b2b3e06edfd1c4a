"""Transformers of fairseq 0.9 to 0.12: one checkpoint with the weights and the options of its training.

Differs from ours: sines and cosines have other frequencies, and positions begin at padding_idx + 1 = 2; both become a
table of positions. The decoder starts from </s>.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.extras.peers.layout import Layout
from manyheads.extras.peers.peer import Options
from manyheads.extras.peers.plain_transformer import PlainTransformer, tie_of

__all__ = ["Fairseq"]

_SIDES = ("encoder", "decoder")
_FIRST_POSITION = 2  # padding_idx + 1
_ON = ("normalize_before", "learned_pos")


class Fairseq(PlainTransformer):
    """A config holds the arguments of the training, `args` or `cfg.model` in the checkpoint, under `model`."""

    name = "fairseq"
    kinds = ("fairseq",)
    options: ClassVar[Options] = {
        **{f"{side}_{name}": int for side in _SIDES for name in ("layers", "embed_dim", "ffn_embed_dim")},
        **{f"{side}_attention_heads": int for side in _SIDES},
        **{f"{side}_{name}": False for side in _SIDES for name in _ON},
        "max_source_positions": 1024,
        "max_target_positions": 1024,
        "activation_fn": "relu",
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "no_scale_embedding": False,
        "share_all_embeddings": False,
        "share_decoder_input_output_embed": False,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "adaptive_softmax_cutoff": ("", []),
        "no_cross_attention": (False,),
        "cross_self_attention": (False,),
        "no_token_positional_embeddings": (False,),
        "layernorm_embedding": (False,),
        "no_decoder_final_norm": (False,),
        "adaptive_input": (False,),
        "scale_fc": (False,),
        "scale_attn": (False,),
        "scale_heads": (False,),
        "scale_resids": (False,),
        "base_layers": (0,),
    }
    layout: ClassVar[Layout] = {
        "{encoder,decoder}.embed_tokens.weight": "body.{source,target}_embedding.weight",
        "{encoder,decoder}.embed_positions.weight": "body.{source,target}_positions.weight",
        "*.layers.*.self_attn.*.*": "body.*.layers.*.self_attn.*.*",
        "*.layers.*.self_attn_layer_norm.*": "body.*.layers.*.self_attn_residual.norm.*",
        "*.layers.*.encoder_attn.*.*": "body.*.layers.*.cross_attn.*.*",
        "*.layers.*.encoder_attn_layer_norm.*": "body.*.layers.*.cross_attn_residual.norm.*",
        "*.layers.*.fc{1,2}.*": "body.*.layers.*.feed_forward.{in,out}_proj.*",
        "*.layers.*.final_layer_norm.*": "body.*.layers.*.feed_forward_residual.norm.*",
        "*.layer_norm.*": "body.*.norm.*",
        "decoder.output_projection.weight": "head.weight",
    }
    # Encoder layers of 0.12 have fused copies of their weights, which the peer makes anew whenever it loads them.
    unused = (
        r"(encoder|decoder)\.(version|embed_positions\._float_tensor)"
        r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
    )

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerConfig:
        source, target = cls.vocab_sizes(weights, *(f"{side}.embed_tokens.weight" for side in _SIDES))
        pre = cls.equal_of(options, "encoder_normalize_before", "decoder_normalize_before")
        return TransformerConfig(
            source_vocab_size=source,
            target_vocab_size=target,
            d_model=cls.equal_of(options, "encoder_embed_dim", "decoder_embed_dim"),
            num_heads=options["encoder_attention_heads"],
            num_decoder_heads=options["decoder_attention_heads"],
            d_ff=options["encoder_ffn_embed_dim"],
            decoder_d_ff=options["decoder_ffn_embed_dim"],
            num_encoder_layers=options["encoder_layers"],
            num_decoder_layers=options["decoder_layers"],
            dropout=options["dropout"],
            attention_dropout=options["attention_dropout"],
            feed_forward_dropout=options["activation_dropout"],
            activation=cls.activation_of(options["activation_fn"]),
            norm_position="pre" if pre else "post",
            positions="learned",
            max_len=cls.equal_of(options, "max_source_positions", "max_target_positions"),
            scale_embedding=not options["no_scale_embedding"],
            tie_embeddings=tie_of(
                embeddings=options["share_all_embeddings"],
                output=options["share_all_embeddings"] or options["share_decoder_input_output_embed"],
            ),
        )

    @classmethod
    def prepare(cls, weights: Mapping[str, Tensor], module: Seq2Seq) -> dict[str, Tensor]:
        """See `Peer.prepare`, with a table of positions for each side, without the rows before the first position."""
        prepared, length = super().prepare(weights, module), module.config.max_len
        for side in _SIDES:
            name = f"{side}.embed_positions.weight"
            learned = prepared.get(name)
            table = _table(_FIRST_POSITION + length, module.config.d_model) if learned is None else learned
            prepared[name] = table[_FIRST_POSITION : _FIRST_POSITION + length]
        return prepared


def _table(length: int, d_model: int) -> Tensor:
    """Return the peer's sines, then cosines, of frequencies 10000^(-i / (d_model / 2 - 1))."""
    half = d_model // 2
    frequency = torch.exp(torch.arange(half, dtype=torch.float64) * (-math.log(10_000.0) / max(half - 1, 1)))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    table = torch.cat([angle.sin(), angle.cos(), torch.zeros(length, d_model % 2, dtype=torch.float64)], dim=1)
    return table.to(torch.float32)
