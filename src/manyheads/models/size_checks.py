"""Choices and checks of sizes that several architectures share. Nothing here imports torch."""

from __future__ import annotations

from typing import Any, Literal

from manyheads.config.checks import MOST_UNITS, between, check
from manyheads.errors import ConfigError

# fmt: off
Activation = Literal[
    "relu", "gelu", "swish", "gelu_tanh", "quick_gelu", "squared_relu",
    "relu6", "leaky_relu", "mish", "sigmoid", "tanh", "linear",
]
# fmt: on
"""The names of `nn.layers.ACTIVATIONS`."""

HeadKind = Literal["encoder", "decoder", "cross"]
"""Self-attention of the encoder, of the decoder or of a language model, and attention of the decoder to the source."""

HEAD_KINDS: tuple[HeadKind, ...] = ("encoder", "decoder", "cross")


def check_heads_divide(config: Any) -> None:
    """Raises: ConfigError: head_dim is 0, and num_heads does not divide d_model."""
    if not config.head_dim and config.d_model % config.num_heads:
        raise ConfigError(
            f"model.d_model {config.d_model} is not divisible by model.num_heads {config.num_heads}; change one of"
            " them, or give head_dim.",
            fields=("d_model", "num_heads", "head_dim"),
        )


def check_attention_options(config: Any, num_heads: dict[str, int], widths: dict[str, int]) -> None:
    """Check grouped queries, gates and rotary positions. Args: numbers and widths of heads, by the fields they are of.

    Raises: ConfigError: num_kv_heads does not divide a number of heads; swiglu has another activation; or rotary
        positions have an odd width or a factor without a scaling.
    """
    check(config, "model.", between(1.0, 1e9), "rotary_base", "rotary_factor")
    check(config, "model.", between(0, MOST_UNITS), "num_kv_heads")
    for name, count in num_heads.items():
        if config.num_kv_heads and count % config.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads is {config.num_kv_heads}, which does not divide model.{name} {count}; take a"
                " divisor, or 0 for as many as there are heads.",
                fields=("num_kv_heads", name),
            )
    if config.ffn == "swiglu" and config.activation not in (type(config).activation, "swish"):
        raise ConfigError(
            f"model.ffn is swiglu, whose activation is swish, but model.activation is {config.activation}; leave it"
            " out, or set model.ffn to mlp.",
            fields=("ffn", "activation"),
        )
    if config.positions == "rotary":
        for name, width in widths.items():
            if width % 2:
                raise ConfigError(
                    f"model.positions rotary turns pairs of features, but the heads have the odd width {width}"
                    f" (model.{name}); take an even one, or other positions.",
                    fields=("positions", name),
                )
    if (config.rotary_scaling == "none") != (config.rotary_factor == 1.0):
        raise ConfigError(
            f"model.rotary_scaling is {config.rotary_scaling} and model.rotary_factor {config.rotary_factor:g}; a"
            " scaling needs a factor above 1, and a factor a scaling, linear or ntk.",
            fields=("rotary_scaling", "rotary_factor"),
        )


def check_tied_sizes(config: Any) -> None:
    """Raises: ConfigError: source and target share one table, but their vocabularies have different sizes."""
    if config.tie_embeddings in ("all", "embeddings") and config.source_vocab_size != config.target_vocab_size:
        raise ConfigError(
            f"model.tie_embeddings is {config.tie_embeddings!r} but source_vocab_size {config.source_vocab_size}"
            f" differs from target_vocab_size {config.target_vocab_size}; use one joint vocabulary, or"
            " tie_embeddings 'decoder' or 'none'.",
            fields=("tie_embeddings", "source_vocab_size", "target_vocab_size"),
        )


def check_vocabularies(config: Any, *names: str) -> None:
    """Raises: ConfigError: one of these vocabulary sizes is missing."""
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"model.{name} is not set; give the number of ids of the vocabulary.")
