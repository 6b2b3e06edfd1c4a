"""Presets of the Reformer.

Those of the paper follow Kitaev et al. 2020, sec. 5; values that it omits come from the configs of its code (trax,
`configs/reformer_*.gin`). Attention uses our `visible: bucket`, not the original chunks.
"""

from __future__ import annotations

from manyheads.architectures.reformer.config import ReformerConfig, ReformerSeq2SeqConfig

PRESETS: dict[str, ReformerConfig] = {
    # A model that learns one batch in a second or two, with every component.
    "debug": ReformerConfig(
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
    ),
    # 16,384 bytes of context on a CPU; used for speed comparisons.
    "small": ReformerConfig(d_model=256, num_heads=4, d_ff=1024, num_layers=4, max_len=16_384, dropout=0.0),
    # enwik8 at 65,536 bytes: 12 layers, 1.19 bits per byte after 20K steps, 1.05 tuned (sec. 5, the last paragraph).
    # Kinds of layers, chunks, hashes and axes follow trax, with the widths that it gives for more memory.
    "enwik8": ReformerConfig(
        d_model=1024,
        num_heads=8,
        head_dim=128,
        d_ff=4096,
        num_layers=12,
        layers=("local", "local", "lsh", "local"),
        axial_shape=(128, 512),
        axial_dims=(256, 768),
        max_len=65_536,
        num_hashes=2,
        num_buckets=(16, 32),
        chunk_len=256,
        local_chunk_len=128,
        dropout=0.2,
        attention_dropout=0.2,
        ff_chunk_len=8192,
    ),
    # 64 x 64 RGB images as 12,288 bytes in raster order; rows, columns and colours are the three axes (trax).
    "imagenet64": ReformerConfig(
        d_model=1024,
        num_heads=8,
        head_dim=64,
        d_ff=4096,
        num_layers=6,
        axial_shape=(64, 64, 3),
        axial_dims=(384, 384, 256),
        max_len=12_288,
        num_hashes=2,
        num_buckets=(12, 16),
        chunk_len=128,
        dropout=0.0,
        attention_dropout=0.2,
        activation="gelu_tanh",
        ff_chunk_len=4096,
    ),
    # Sequences of 1,048,576 bytes, on two cores with 20 GiB of free memory (`benchmarks/reformer_length.py`).
    "million": ReformerConfig(
        d_model=256,
        num_heads=4,
        d_ff=1024,
        num_layers=4,
        axial_shape=(1024, 1024),
        axial_dims=(128, 128),
        max_len=1 << 20,
        num_hashes=2,
        dropout=0.0,
        ff_chunk_len=4096,
    ),
}
SEQ2SEQ_PRESETS: dict[str, ReformerSeq2SeqConfig] = {
    # A model for tests, with hashing.
    "debug": ReformerSeq2SeqConfig(
        d_model=32,
        num_heads=4,
        d_ff=64,
        num_encoder_layers=2,
        num_decoder_layers=2,
        max_len=64,
        attention="lsh",
        chunk_len=4,
        num_hashes=2,
    ),
    # WMT14 English-German, 6 + 6 layers: 27.6 BLEU after 100K steps, 28.0 after 500K with nothing tied (table 4).
    "wmt-base": ReformerSeq2SeqConfig(),
    # WMT14 English-German: 29.1 BLEU after 300K steps with nothing tied (table 4); dropout is the Transformer's.
    "wmt-big": ReformerSeq2SeqConfig(d_model=1024, num_heads=16, d_ff=4096, dropout=0.3, tie_embeddings="none"),
}
