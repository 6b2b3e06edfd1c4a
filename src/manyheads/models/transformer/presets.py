"""Presets of the Transformer."""

from __future__ import annotations

from manyheads.models.transformer.config import TransformerConfig

PRESETS: dict[str, TransformerConfig] = {
    # A model that learns one batch in a second or two, with every component.
    "debug": TransformerConfig(
        d_model=32, num_heads=4, d_ff=64, num_encoder_layers=2, num_decoder_layers=2, dropout=0.1
    ),
    # Multi30k's Transformer-Tiny: Wu et al. 2021 (ACL), sec. 4.1.
    "tiny": TransformerConfig(
        d_model=128, num_heads=4, d_ff=256, num_encoder_layers=4, num_decoder_layers=4, dropout=0.3
    ),
    # Vaswani et al. 2017, table 3, row "base": 65M parameters with a vocabulary of 37,000.
    "base": TransformerConfig(),
    # Vaswani et al. 2017, table 3, row "big": 213M parameters.
    "big": TransformerConfig(d_model=1024, num_heads=16, d_ff=4096, dropout=0.3),
}
