"""What a format holds of a model: the fields of its config, each by name.

A field that a format does not list must have its default, and is otherwise refused by name. Therefore a field that is
new, or a whole architecture, is in no format until the format lists it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeAlias

from manyheads.errors import ConfigError

Holds: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Field of a config -> the values that a format holds, or their classes; (): all."""


def any_of(names: str) -> Holds:
    """Fields, with spaces between them, of which every value is held."""
    return dict.fromkeys(names.split(), ())


TRANSFORMER = {
    **any_of(
        """architecture source_vocab_size target_vocab_size d_model num_heads head_dim value_dim d_ff num_decoder_heads
        encoder_heads decoder_heads cross_heads decoder_d_ff num_encoder_layers num_decoder_layers dropout
        attention_dropout feed_forward_dropout norm_position norm_eps final_norm bias max_len scale_embedding
        tie_embeddings head_bias initialisation"""
    ),
    "positions": ("sinusoidal", "sinusoidal_halves", "learned", "none"),
}
"""What all formats of a Transformer hold, as far as they do not narrow it."""

TRANSFORMER_XL = any_of(
    """architecture vocab_size d_model num_heads head_dim layer_heads d_ff num_layers d_embed cutoffs div_value dropout
    attention_dropout attention norm_position norm_eps share_biases max_len memory_len clamp_len same_length
    same_length_extra_key initial_memory ext_len tie_embeddings tie_projections"""
)

REFORMER = any_of(
    """architecture vocab_size d_model num_heads head_dim d_ff dropout attention_dropout activation norm_eps max_len
    chunk_len num_hashes num_buckets exact_len ff_chunk_len reversible keep_attention hash_seed num_layers layers
    positions axial_shape axial_dims causal visible chunks_before chunks_after within_bucket correct_duplicates
    look_across_rounds wrap local_chunk_len local_chunks_before local_chunks_after local_wrap local_slopes train_slopes
    shared_rotations pad_to_chunks"""
)


def check_held(name: str, config: Any, holds: Holds, section: str = "") -> None:
    """Args: name: of the format, in messages. section: before the names of fields, there.

    Raises: ConfigError: a field has a value that the format does not hold.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in holds:
            demand(name, f"{section}{item.name}", value, holds[item.name])
            continue
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if value != default:
            raise ConfigError(
                f"{name} cannot hold a model with {section}{item.name} {value!r}; take another format, or train"
                " without this."
            )
    if undivided := getattr(config, "undivided", ""):
        raise ConfigError(
            f"{name} cannot hold a model with {section}{undivided}; take another format, or train without this. In this"
            " format each layer has num_heads heads of width d_model / num_heads; take a model before it was pruned."
        )


def demand(name: str, setting: str, value: Any, values: tuple[Any, ...]) -> None:
    """Raises: ConfigError: the value of a setting is not one of those that the format has; (): it has all."""
    if values and value not in values and type(value) not in values:
        shown = getattr(value, "kind", value)
        known = ", ".join(dict.fromkeys(repr(getattr(one, "kind", one)) for one in values))
        raise ConfigError(
            f"{name} cannot hold a model with {setting} {shown!r}; it has {known}. Train with one of these, or use"
            " another format or manyheads itself."
        )
