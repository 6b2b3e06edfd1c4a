"""Transformers of JoeyNMT 2: config.yaml, vocabularies, and a checkpoint of its training.

Differs from our defaults: norms have epsilon 1e-6; there is no bias on the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.config.files import load_yaml
from manyheads.config.merge import to_dotted
from manyheads.errors import ConfigError, ModelFileError
from manyheads.extras.peers.layout import Layout
from manyheads.extras.peers.peer import Options
from manyheads.extras.peers.plain_transformer import PlainTransformer, tie_of

__all__ = ["JoeyNMT", "options_of_folder"]

_SIDES = ("encoder", "decoder")


class JoeyNMT(PlainTransformer):
    """A config holds the section `model` of config.yaml under `model`, with dots in place of nesting."""

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
