"""Checks of sizes that several architectures share. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from manyheads.errors import ConfigError


def check_heads_divide(config: Any) -> None:
    """Raises: ConfigError: head_dim is 0, and num_heads does not divide d_model."""
    if not config.head_dim and config.d_model % config.num_heads:
        raise ConfigError(
            f"model.d_model {config.d_model} is not divisible by model.num_heads {config.num_heads}; change one of"
            " them, or give head_dim.",
            fields=("d_model", "num_heads", "head_dim"),
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
