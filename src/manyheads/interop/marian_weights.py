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
from manyheads.interop.names import Pair, export_weights, import_weights, pick
from manyheads.nn.attention.kinds import DotProductAttentionConfig
from manyheads.nn.positions import sinusoidal_table

__all__ = ["ACTIVATIONS", "OPTIONS", "build", "check_size", "to_peer"]

OPTIONS: dict[str, Any] = {
    "vocab_size": 58101,
    "decoder_vocab_size": None,
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
    "pad_token_id": 58100,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "decoder_start_token_id": 58100,
}
"""MarianConfig's defaults: what a config.json leaves out."""
# Options of earlier versions that change the computation.
_REFUSED = ("normalize_before", "normalize_embedding", "add_final_layer_norm", "tie_encoder_decoder")
ACTIVATIONS = {
    **{"relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "swish": "swish", "silu": "swish", "tanh": "tanh"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
    **{name: name for name in ("quick_gelu", "relu6", "leaky_relu", "mish", "sigmoid", "linear")},
    "relu2": "squared_relu",
}
_SHARED, _HEAD = "model.shared.weight", "lm_head.weight"
_TABLES = {"source": "model.encoder.embed_tokens.weight", "target": "model.decoder.embed_tokens.weight", "head": _HEAD}
_BIAS = "final_logits_bias"
_ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # tolerance for a table saved in low precision; otherwise 1e-5


def build(options: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> Seq2Seq:
    """Return our model with a MarianMTModel's weights, in evaluation mode and the weights' precision.

    Args:
        options: MarianConfig's, as in config.json.
        state_dict: parameters and buffers; names of tied matrices and of positions may be missing.

    Raises: ConfigError: an unsupported option. ModelFileError: names or shapes that do not match.
    """
    known = {name: value for name, value in options.items() if name in OPTIONS}
    peer = pick(known, OPTIONS, "Marian")
    _check_types(peer)
    for name in _REFUSED:
        if options.get(name):
            raise ConfigError(f"{name} is set in Marian's config; the layers that it asks for are not known here.")
    if options.get("model_type", "marian") != "marian":
        raise ConfigError(f"this is a config of model_type {options['model_type']!r}, not of a Marian model.")
    if peer["activation_function"] not in ACTIVATIONS:
        raise ConfigError(
            f"activation_function is {peer['activation_function']!r}; known are {', '.join(sorted(ACTIVATIONS))}."
        )
    sizes = ("vocab_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_model")
    layers, widest = peer["encoder_layers"] + peer["decoder_layers"], max(peer[name] for name in sizes)
    check_size(state_dict, layers, peer["d_model"] * widest)
    tensors = {name: tensor for name, tensor in state_dict.items() if not name.endswith("embed_positions.weight")}
    positions = {side: state_dict.get(f"model.{side}.embed_positions.weight") for side in ("encoder", "decoder")}
    tie = _tie(peer, tensors)
    config = _config(peer, tie)
    if any(not _is_formula(table, config.d_model, side) for side, table in positions.items()):
        config = replace(
            config, positions="learned", max_len=max(t.shape[0] for t in positions.values() if t is not None)
        )
    weights = _without_aliases(tensors, tie)
    weights.setdefault(_BIAS, torch.zeros(config.target_vocab_size, dtype=next(iter(weights.values())).dtype))
    weights[_BIAS] = weights[_BIAS].reshape(-1)
    if config.positions == "learned":
        for side, table in positions.items():
            formula = sinusoidal_table(torch.arange(float(config.max_len)), config.d_model, "halves")
            weights[f"model.{side}.embed_positions.weight"] = formula if table is None else table
    module: Seq2Seq = build_model(config)
    import_weights(module, weights, _pairs(config))
    return module.eval()


def to_peer(module: Seq2Seq) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer`: MarianConfig's options (under `model`; without special ids) and the state dict.

    Tied matrices occur once, as transformers saves them; the table of positions only if it is not sinusoidal.
    Raises: ConfigError: the peer does not support one of the options.
    """
    config = module.config
    wanted: dict[str, Any] = {
        "norm": "layer",
        "norm_position": "post",
        "norm_eps": 1e-5,
        "has_final_norm": False,
        "bias": True,
        "attention": DotProductAttentionConfig(),
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ConfigError(f"Marian cannot hold a model with {name} {getattr(config, name)!r}; it has {value!r}.")
    if config.positions == "sinusoidal":
        raise ConfigError("Marian cannot hold a model with positions 'sinusoidal'; it has 'sinusoidal_halves'.")
    activation = next(peer for peer, ours in ACTIVATIONS.items() if ours == config.activation)
    options = {
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
    weights = export_weights(module.state_dict(), _pairs(config))
    vocab_size = config.target_vocab_size
    weights[_BIAS] = weights[_BIAS].view(1, -1) if config.head_bias else torch.zeros(1, vocab_size)
    if (
        config.tie_embeddings == "embeddings"
    ):  # with a separate output, versions of the peer differ in what else is tied
        weights |= {_TABLES[side]: weights[_SHARED].clone() for side in ("source", "target")}
    return {"model": options}, weights


def _check_types(peer: Mapping[str, Any]) -> None:
    for name, default in OPTIONS.items():
        if name.endswith("token_id"):
            continue  # only generation uses these
        value, kind = peer[name], int if default is None else type(default)
        fits = type(value) is kind or (kind is float and type(value) is int) or (default is None and value is None)
        if not fits or (kind in (int, float) and value is not None and value < 0):
            raise ConfigError(
                f"{name} is {value!r} in Marian's config; it must be of type {kind.__name__}, and not below 0."
            )


def check_size(tensors: Mapping[str, Tensor], layers: int, largest: int) -> None:
    """Refuse a config that describes far more than the weights contain, before anything of that size is built.

    Raises: ModelFileError: there are fewer tensors than layers, or fewer numbers than in the largest matrix; or they
        are
        not floating-point numbers.
    """
    odd = next((name for name, tensor in tensors.items() if not tensor.is_floating_point()), None)
    if odd is not None:
        raise ModelFileError(f"{odd} holds {tensors[odd].dtype}; weights are floating-point numbers.")
    num_values = sum(tensor.numel() for tensor in tensors.values())
    if layers > len(tensors) or largest > num_values:
        raise ModelFileError(
            f"the weights hold {num_values:,} numbers in {len(tensors)} tensors, far fewer than their config describes"
            f" ({layers:,} layers, largest matrix {largest:,}); the two do not belong together."
        )


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
    source, target = tensors.get(_TABLES["source"]), tensors.get(_TABLES["target"])
    # Since version 5 nothing is tied if the output is not tied, whatever the other option says.
    apart = source is not None and target is not None and not torch.equal(source, target)
    return "embeddings" if peer["share_encoder_decoder_embeddings"] and not apart else "none"


def _groups(tie: str) -> list[list[str]]:
    """Return the names of each matrix; the first is the one under which the peer saves it."""
    source, target, head = _TABLES.values()
    return {
        "all": [[_SHARED, source, target, head]],
        "embeddings": [[_SHARED, source, target], [head]],
        "decoder": [[source], [target, head]],
        "none": [[source], [target], [head]],
    }[tie]


def _without_aliases(tensors: Mapping[str, Tensor], tie: str) -> dict[str, Tensor]:
    """Return each tied matrix under its first name only.

    Raises: ModelFileError: two tensors differ that should be one matrix.
    """
    weights = dict(tensors)
    for names in _groups(tie):
        found = {name: weights.pop(name) for name in names if name in weights}
        for name, tensor in found.items():
            first = next(iter(found))
            if tensor.shape != found[first].shape or not torch.equal(tensor, found[first]):
                raise ModelFileError(f"{first} and {name} differ, but the config says that they are one matrix.")
        if found:
            weights[names[0]] = next(iter(found.values()))
    if tie == "none":
        weights.pop(_SHARED, None)  # an unused leftover
    return weights


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


def _pairs(config: TransformerConfig) -> list[Pair]:
    ours = {"source": "source_embedding.weight", "target": "target_embedding.weight"}
    tables = {_TABLES[side]: f"body.{name}" for side, name in ours.items()} | {_HEAD: "head.weight"}
    tables[_SHARED] = "body.source_embedding.weight"
    pairs = [Pair(names[0], (tables[names[0]],)) for names in _groups(config.tie_embeddings)]
    if config.head_bias:
        pairs.append(Pair(_BIAS, ("head.bias",)))
    if config.positions == "learned":
        for side, name in (("encoder", "source"), ("decoder", "target")):
            pairs.append(Pair(f"model.{side}.embed_positions.weight", (f"body.{name}_positions.weight",)))

    def both(peer: str, ours: str) -> None:
        pairs.extend(Pair(f"model.{peer}.{kind}", (f"body.{ours}.{kind}",)) for kind in ("weight", "bias"))

    for stack, count in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        attentions = {"self_attn": "self_attn"} | ({"encoder_attn": "cross_attn"} if stack == "decoder" else {})
        for layer in (f"{stack}.layers.{i}" for i in range(count)):
            for peer, own in attentions.items():
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    both(f"{layer}.{peer}.{part}", f"{layer}.{own}.{part}")
                both(f"{layer}.{peer}_layer_norm", f"{layer}.{own}_residual.norm")
            both(f"{layer}.fc1", f"{layer}.feed_forward.in_proj")
            both(f"{layer}.fc2", f"{layer}.feed_forward.out_proj")
            both(f"{layer}.final_layer_norm", f"{layer}.feed_forward_residual.norm")
    return pairs
