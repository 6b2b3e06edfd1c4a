"""Named sizes of the Reformer."""

from __future__ import annotations

from collections.abc import Callable

from manyheads.architectures.reformer.config import ReformerConfig

__all__ = ["PRESETS"]


def debug() -> ReformerConfig:
    """Small enough to learn one batch in a second or two, with every part in it."""
    return ReformerConfig(
        d_model=32,
        num_heads=2,
        head_dim=12,
        d_ff=64,
        num_layers=2,
        layers=("local", "lsh"),
        max_len=64,
        chunk_len=4,
        local_chunk_len=4,
        num_hashes=2,
        ff_chunk_len=8,
    )


PRESETS: dict[str, Callable[[], ReformerConfig]] = {"debug": debug}
