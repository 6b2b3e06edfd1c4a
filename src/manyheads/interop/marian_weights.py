"""Conversion of the weights of MarianMTModel in both directions.

Differs from ours: a bias on the logits that is not a parameter; a table of positions in the file, which is normally
sinusoidal (another table is kept as learned positions); embeddings under up to four names, of which a file may lack
some. Unknown options in a config.json have no effect in the peer and none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.table import build_model
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.errors import ConfigError, ModelFileError
from manyheads.interop.layout import Layout, Rule, export_weights, import_weights
from manyheads.interop.peer import Options, check_size, read_options
from manyheads.nn.attention.kinds import DotProductAttentionConfig
from manyheads.nn.positions import sinusoidal_table

__all__ = ["ACTIVATIONS", "OPTIONS", "SPECIAL_IDS", "build", "to_peer"]

_BIAS, _SHARED = "final_logits_bias", "model.shared.weight"
LAYOUT: Layout = {
    _SHARED: "body.source_embedding.weight",
    "model.{encoder,decoder}.embed_tokens.weight": "body.{source,target}_embedding.weight",
    "model.{encoder,decoder}.embed_positions.weight": "body.{source,target}_positions.weight",
    "model.*.layers.*.self_attn.*.*": "body.*.layers.*.self_attn.*.*",
    "model.*.layers.*.self_attn_layer_norm.*": "body.*.layers.*.self_attn_residual.norm.*",
    "model.*.layers.*.encoder_attn.*.*": "body.*.layers.*.cross_attn.*.*",
    "model.*.layers.*.encoder_attn_layer_norm.*": "body.*.layers.*.cross_attn_residual.norm.*",
    "model.*.layers.*.fc{1,2}.*": "body.*.layers.*.feed_forward.{in,out}_proj.*",
    "model.*.layers.*.final_layer_norm.*": "body.*.layers.*.feed_forward_residual.norm.*",
    "lm_head.weight": "head.weight",
    _BIAS: Rule("head.bias", lambda parts: parts[0].clone()[None], lambda row, _: row.unbind()),
}
OPTIONS: Options = {
    "model_type": "marian",
    "vocab_size": 58101,
    "decoder_vocab_size": int | None,
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "scale_embedding": False,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
}
"""MarianConfig's options for the model, and its defaults."""
SPECIAL_IDS = {
    "pad_token_id": 58100,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "decoder_start_token_id": 58100,
}
"""MarianConfig's options for generation, and its defaults."""
# Options of earlier versions that change the computation.
_REFUSED = ("normalize_before", "normalize_embedding", "add_final_layer_norm", "tie_encoder_decoder")
ACTIVATIONS = {
    **{"relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "swish": "swish", "silu": "swish", "tanh": "tanh"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
    **{name: name for name in ("quick_gelu", "relu6", "leaky_relu", "mish", "sigmoid", "linear")},
    "relu2": "squared_relu",
}
_ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # tolerance for a table saved in low precision; otherwise 1e-5


def build(options: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> Seq2Seq:
    """Return our model with a MarianMTModel's weights, in evaluation mode and the weights' precision.

    Args:
        options: MarianConfig's, as in config.json.
        state_dict: parameters and buffers; names of tied matrices and of positions may be missing.

    Raises: ConfigError: an unsupported option. ModelFileError: names or shapes that do not match.
    """
    peer = read_options({name: value for name, value in options.items() if name in OPTIONS}, OPTIONS, "Marian")
    for name in _REFUSED:
        if options.get(name):
            raise ConfigError(f"{name} is set in Marian's config; the layers that it asks for are not known here.")
    if peer["activation_function"] not in ACTIVATIONS:
        raise ConfigError(
            f"activation_function is {peer['activation_function']!r}; known are {', '.join(sorted(ACTIVATIONS))}."
        )
    config = _config(peer, _tie(peer, state_dict))
    check_size(state_dict, config)
    weights = dict(state_dict)
    positions = {side: weights.pop(f"model.{side}.embed_positions.weight", None) for side in ("encoder", "decoder")}
    if any(not _is_formula(table, config.d_model, side) for side, table in positions.items()):
        config = replace(
            config, positions="learned", max_len=max(t.shape[0] for t in positions.values() if t is not None)
        )
    if config.positions == "learned":
        for side, table in positions.items():
            formula = sinusoidal_table(torch.arange(float(config.max_len)), config.d_model, "halves")
            weights[f"model.{side}.embed_positions.weight"] = formula if table is None else table
    if config.tie_embeddings == "none":
        weights.pop(_SHARED, None)  # an unused leftover
    if _BIAS in weights:
        weights[_BIAS] = weights[_BIAS].reshape(1, -1)
    else:
        weights[_BIAS] = torch.zeros(1, config.target_vocab_size)
    module: Seq2Seq = build_model(config)
    import_weights(module, weights, _layout(config))
    return module.eval()


def to_peer(module: Seq2Seq) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer`: MarianConfig's options (under `model`; without special ids) and the state dict.

    Tied matrices occur once, as transformers saves them; the table of positions only if it is not sinusoidal.
    Raises: ConfigError: the peer does not support one of the options.
    """
    config = module.config
    wanted = {
        "norm": "layer",
        "norm_position": "post",
        "norm_eps": 1e-5,
        "has_final_norm": False,
        "bias": True,
        "attention": DotProductAttentionConfig(),
        "positions": "learned" if config.positions == "learned" else "sinusoidal_halves",
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ConfigError(f"Marian cannot hold a model with {name} {getattr(config, name)!r}; it has {value!r}.")
    activation = next(peer for peer, ours in ACTIVATIONS.items() if ours == config.activation)
    options: ClassVar[Options] = {
        "vocab_size": config.source_vocab_size,
        "decoder_vocab_size": config.target_vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.heads_of("decoder"),
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff_of("decoder"),
        "max_position_embeddings": config.max_len,
        "activation_function": activation,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.feed_forward_dropout,
        "scale_embedding": config.scale_embedding,
        "share_encoder_decoder_embeddings": config.tie_embeddings in ("all", "embeddings"),
        "tie_word_embeddings": config.tie_embeddings in ("all", "decoder"),
    }
    # With a separate output, versions of the peer differ in what else is tied, so all names are written.
    weights = export_weights(module, _layout(config), all_names=config.tie_embeddings == "embeddings")
    if not config.head_bias:
        weights[_BIAS] = torch.zeros(1, config.target_vocab_size)
    return {"model": options}, weights


def _config(peer: Mapping[str, Any], tie: Literal["all", "decoder", "embeddings", "none"]) -> TransformerConfig:
    is_shared = peer["share_encoder_decoder_embeddings"]
    target_size = peer["vocab_size"] if is_shared else peer["decoder_vocab_size"] or peer["vocab_size"]
    return TransformerConfig(
        source_vocab_size=peer["vocab_size"],
        target_vocab_size=target_size,
        d_model=peer["d_model"],
        num_heads=peer["encoder_attention_heads"],
        num_decoder_heads=peer["decoder_attention_heads"],
        d_ff=peer["encoder_ffn_dim"],
        decoder_d_ff=peer["decoder_ffn_dim"],
        num_encoder_layers=peer["encoder_layers"],
        num_decoder_layers=peer["decoder_layers"],
        dropout=float(peer["dropout"]),
        attention_dropout=float(peer["attention_dropout"]),
        feed_forward_dropout=float(peer["activation_dropout"]),
        activation=ACTIVATIONS[peer["activation_function"]],  # type: ignore[arg-type]
        positions="sinusoidal_halves",
        max_len=peer["max_position_embeddings"],
        scale_embedding=peer["scale_embedding"],
        tie_embeddings=tie,
        head_bias=True,
    )


def _tie(peer: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Literal["all", "decoder", "embeddings", "none"]:
    if peer["tie_word_embeddings"]:
        return "all" if peer["share_encoder_decoder_embeddings"] else "decoder"
    source, target = (tensors.get(f"model.{side}.embed_tokens.weight") for side in ("encoder", "decoder"))
    # Since version 5 nothing is tied if the output is not tied, whatever the other option says.
    apart = source is not None and target is not None and not torch.equal(source, target)
    return "embeddings" if peer["share_encoder_decoder_embeddings"] and not apart else "none"


def _is_formula(table: Tensor | None, d_model: int, side: str) -> bool:
    """Return whether a table equals the sinusoidal positions that we compute."""
    if table is None:
        return True
    if table.dim() != 2 or table.shape[1] != d_model:
        raise ModelFileError(
            f"model.{side}.embed_positions.weight has shape {tuple(table.shape)}, d_model is {d_model}."
        )
    formula = sinusoidal_table(torch.arange(float(table.shape[0])), d_model, "halves")
    return bool(((table.float() - formula).abs() <= _ROUNDING.get(table.dtype, 1e-5)).all())


def _layout(config: TransformerConfig) -> Layout:
    shares_embeddings = config.tie_embeddings in ("all", "embeddings")
    return {name: ours for name, ours in LAYOUT.items() if name != _SHARED or shares_embeddings}
