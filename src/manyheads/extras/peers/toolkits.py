"""Plain Transformers of three toolkits: fairseq 0.9 to 0.12, JoeyNMT 2, OpenNMT-py 3.

What they share comes first: options that must be neutral, positions, inputs and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from manyheads.config.files import load_yaml, to_dotted
from manyheads.errors import ConfigError, ModelFileError
from manyheads.extras.peers.peer import Options, Peer, decode, encode, require
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.positions import sinusoidal_table

if TYPE_CHECKING:
    from manyheads.extras.peers.peer import Layout
    from manyheads.models.composites import Seq2Seq

ACTIVATIONS = {
    **{"relu": "relu", "gelu": "gelu", "tanh": "tanh", "linear": "linear", "swish": "swish", "silu": "swish"},
    **dict.fromkeys(("gelu_accurate", "gelu_fast"), "gelu_tanh"),
}
_TOLERANCE = 1e-5


class PlainTransformer(Peer):
    """A translation model with in.src, in.src_mask (1: a token) and in.decoder_input_ids; it gives out.logits.

    Attributes: neutral: options of the peer that our model does not have, and the only values that can be converted.
    """

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignores_others = True
    inputs = ("src", "src_mask", "decoder_input_ids")

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Peer.read`. Raises: ConfigError: an option has a value that our model does not support."""
        given = config.get("model")
        for name, allowed in cls.neutral.items():
            value = given.get(name) if isinstance(given, Mapping) else None
            if value is not None and value not in allowed:
                known = " or ".join(map(repr, allowed))
                raise ConfigError(f"{name} is {value!r}; a model of {cls.name} can be converted with {known} only.")
        return super().read(config)

    @classmethod
    def activation_of(cls, name: str) -> Any:
        """Return our name of an activation. Raises: ConfigError: we do not have it."""
        if name not in ACTIVATIONS:
            raise ConfigError(f"the activation is {name!r}; of {cls.name} those are known: {', '.join(ACTIVATIONS)}.")
        return ACTIVATIONS[name]

    @classmethod
    def equal_of(cls, options: Mapping[str, Any], *names: str) -> Any:
        """Return the value of several options. Raises: ConfigError: they differ, and our model has one for all."""
        values = [options[name] for name in names]
        if any(value != values[0] for value in values):
            shown = ", ".join(f"{name} {value!r}" for name, value in zip(names, values, strict=True))
            raise ConfigError(f"{shown} in a model of {cls.name}: our model has one value for both.")
        return values[0]

    @classmethod
    def vocab_sizes(cls, weights: Mapping[str, Tensor], source: str, target: str) -> tuple[int, int]:
        """Return the rows of the two tables of embeddings. Raises: ModelFileError: one is missing or no matrix."""
        tables = [weights[name] for name in (source, target) if name in weights and weights[name].dim() == 2]
        if len(tables) < 2:
            raise ModelFileError(f"{source} and {target} are needed, with two axes.")
        return tables[0].shape[0], tables[1].shape[0]

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        source, target = require(inputs, "src", "decoder_input_ids")
        mask = inputs.get("in.src_mask", torch.ones_like(source)) != 0
        allowed = mask[:, None, None]
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()[None, None]
        module: Seq2Seq = self.module
        hidden = decode(module, target, encode(module, source, allowed), causal, allowed)
        return {"out.logits": module.head.logits(hidden)}


def is_formula(table: Tensor, d_model: int) -> bool:
    """Return whether a table of positions has the interleaved sines and cosines of the paper."""
    rows = sinusoidal_table(torch.arange(float(table.shape[0])), d_model)
    return table.shape == rows.shape and torch.allclose(table.float(), rows, rtol=0.0, atol=10 * _TOLERANCE)


def tie_of(*, embeddings: bool, output: bool) -> Any:
    """Return `tie_embeddings` for two switches: source and target, and target and output."""
    if embeddings:
        return "all" if output else "embeddings"
    return "decoder" if output else "none"


_SIDES = ("encoder", "decoder")
_FIRST_POSITION = 2  # padding_idx + 1
_ON = ("normalize_before", "learned_pos")


class Fairseq(PlainTransformer):
    """A config holds the arguments of the training, `args` or `cfg.model` in the checkpoint, under `model`.

    Differs from ours: sines and cosines have other frequencies, and positions begin at padding_idx + 1 = 2; both become
    a table of positions. The decoder starts from </s>.
    """

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


class JoeyNMT(PlainTransformer):
    """A config holds the section `model` of config.yaml under `model`, with dots in place of nesting.

    Differs from our defaults: norms have epsilon 1e-6; there is no bias on the output.
    """

    name = "JoeyNMT"
    kinds = ("joeynmt",)
    options: ClassVar[Options] = {
        "tied_embeddings": False,
        "tied_softmax": False,
        **{f"{side}.{name}": int for side in _SIDES for name in ("num_layers", "num_heads", "hidden_size", "ff_size")},
        **{f"{side}.dropout": 0.1 for side in _SIDES},
        **{f"{side}.embeddings.scale": False for side in _SIDES},
        **{f"{side}.activation": "relu" for side in _SIDES},
        "encoder.layer_norm": str | None,
        "decoder.layer_norm": "post",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{f"{side}.type": ("transformer",) for side in _SIDES},
        **{f"{side}.alpha": (1.0,) for side in _SIDES},
    }
    layout: ClassVar[Layout] = {
        "{src,trg}_embed.lut.weight": "body.{source,target}_embedding.weight",
        "encoder.layers.*.src_src_att.{q,k,v,output}_layer.*": "body.encoder.layers.*.self_attn.{q,k,v,out}_proj.*",
        "decoder.layers.*.trg_trg_att.{q,k,v,output}_layer.*": "body.decoder.layers.*.self_attn.{q,k,v,out}_proj.*",
        "decoder.layers.*.src_trg_att.{q,k,v,output}_layer.*": "body.decoder.layers.*.cross_attn.{q,k,v,out}_proj.*",
        "encoder.layers.*.layer_norm.*": "body.encoder.layers.*.self_attn_residual.norm.*",
        "decoder.layers.*.{x,dec}_layer_norm.*": "body.decoder.layers.*.{self,cross}_attn_residual.norm.*",
        "*.layers.*.feed_forward.layer_norm.*": "body.*.layers.*.feed_forward_residual.norm.*",
        "*.layers.*.feed_forward.pwff_layer.{0,3}.*": "body.*.layers.*.feed_forward.{in,out}_proj.*",
        "*.layer_norm.*": "body.*.norm.*",
        "decoder.output_layer.weight": "head.weight",
    }
    unused = r".*\.pe\.pe"

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerConfig:
        # Without the option, the peer's encoder norms before each sublayer and has no final norm.
        position: Any = options["encoder.layer_norm"] or "pre"
        if position != options["decoder.layer_norm"]:
            raise ConfigError(
                f"layer_norm is {position!r} in the encoder and {options['decoder.layer_norm']!r} in the decoder;"
                " our model has one for both."
            )
        ends = {side: f"{side}.layer_norm.weight" in weights for side in _SIDES}
        if ends["encoder"] != ends["decoder"]:
            raise ConfigError("only one of encoder and decoder ends with a norm; in our model both do, or none.")
        source, target = cls.vocab_sizes(weights, "src_embed.lut.weight", "trg_embed.lut.weight")
        return TransformerConfig(
            source_vocab_size=source,
            target_vocab_size=target,
            d_model=cls.equal_of(options, "encoder.hidden_size", "decoder.hidden_size"),
            num_heads=options["encoder.num_heads"],
            num_decoder_heads=options["decoder.num_heads"],
            d_ff=options["encoder.ff_size"],
            decoder_d_ff=options["decoder.ff_size"],
            num_encoder_layers=options["encoder.num_layers"],
            num_decoder_layers=options["decoder.num_layers"],
            dropout=options["encoder.dropout"],
            attention_dropout=options["encoder.dropout"],
            feed_forward_dropout=options["encoder.dropout"],
            activation=cls.activation_of(cls.equal_of(options, "encoder.activation", "decoder.activation")),
            norm_position=position,
            norm_eps=1e-6,
            final_norm=ends["encoder"],
            scale_embedding=cls.equal_of(options, "encoder.embeddings.scale", "decoder.embeddings.scale"),
            tie_embeddings=tie_of(embeddings=options["tied_embeddings"], output=options["tied_softmax"]),
        )


def options_of_folder(folder: Path) -> dict[str, Any]:
    """Return the section `model` of config.yaml, nested sections with dots.

    Raises: ConfigError, ModelFileError: it is missing or damaged, or has no such section.
    """
    if not (folder / "config.yaml").is_file():
        raise ModelFileError(f"{folder} is not a model of JoeyNMT: it has no config.yaml.")
    model = load_yaml(folder / "config.yaml").values.get("model")
    if not isinstance(model, dict):
        raise ConfigError(f"{folder / 'config.yaml'} has no section 'model' with the options of a model.")
    options = to_dotted(model)
    if options.get("tied_embeddings"):  # then the peer uses the encoder's for both
        options["decoder.embeddings.scale"] = options.get("encoder.embeddings.scale", False)
    return options


_EMBEDDING = "{side}.embeddings.make_embedding.emb_luts.0.weight"
_POSITIONS = "{side}.embeddings.make_embedding.pe.pe"


class OpenNMT(PlainTransformer):
    """A config holds the options of the training, `opt` in the checkpoint, under `model`.

    Differs from our defaults: norms have epsilon 1e-6 and stand before sublayers; attention has no biases by default.
    """

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
