"""Presets of the Transformer-XL.

Those of the paper follow Dai et al. 2019, sec. 4.1, with widths, memories, cutoffs and tying of the official scripts.
Cutoffs are for the vocabulary sizes of the corpora (WikiText-103: 267,735 words; One Billion Word: 793,471).
"""

from __future__ import annotations

from manyheads.architectures.transformer_xl.config import TransformerXLConfig

PRESETS: dict[str, TransformerXLConfig] = {
    # A model that learns one batch in a second or two, with every component.
    "debug": TransformerXLConfig(d_model=32, num_heads=2, head_dim=12, d_ff=64, num_layers=2, memory_len=8),
    # For one novel, on two cores, in minutes.
    "demo": TransformerXLConfig(
        d_model=192,
        num_heads=4,
        head_dim=48,
        d_ff=768,
        num_layers=4,
        dropout=0.0,
        relative_bias=16,
        memory_len=128,
    ),
    # For a few megabytes of text on a CPU; used for speed comparisons.
    "small": TransformerXLConfig(d_model=256, num_heads=4, head_dim=64, d_ff=1024, num_layers=6, memory_len=128),
    # `small` without recurrence and with absolute positions: attention within segments only.
    # The kind of Al-Rfou et al. 2019, arXiv:1808.04444, the baseline of the paper's table of evaluation speed (sec.
    # 4.5).
    "vanilla-lm": TransformerXLConfig(
        d_model=256, num_heads=4, head_dim=64, d_ff=1024, num_layers=6, memory_len=0, attention="absolute"
    ),
    # Al-Rfou et al. 2019, sec. 3: 64 layers, contexts of 512 characters, positions trained in each layer: 219M
    # parameters, as the paper says of its evaluation. Without its auxiliary losses.
    "vanilla-lm-64": TransformerXLConfig(
        d_model=512,
        num_heads=2,
        head_dim=256,
        d_ff=2048,
        num_layers=64,
        dropout=0.55,
        memory_len=0,
        attention="absolute_learned",
        max_len=512,
    ),
    # enwik8 and text8, 12 layers: 41M parameters, 1.06 bits per character (table 2).
    "enwik8-base": TransformerXLConfig(d_model=512, num_heads=8, head_dim=64, d_ff=2048, num_layers=12, memory_len=512),
    # enwik8 and text8, 24 layers: 277M parameters, 0.99 bits per character (table 2).
    "enwik8-large": TransformerXLConfig(
        d_model=1024,
        num_heads=8,
        head_dim=128,
        d_ff=3072,
        num_layers=24,
        dropout=0.15,
        attention_dropout=0.15,
        share_biases=False,
        memory_len=768,
    ),
    # WikiText-103, 16 layers: 151M parameters, perplexity 24.0 (table 1).
    "wikitext103-base": TransformerXLConfig(head_dim=41, cutoffs=(20_000, 40_000, 200_000)),
    # WikiText-103, 18 layers: perplexity 18.3 (table 1). 285M parameters in total; the paper says 257M.
    "wikitext103-large": TransformerXLConfig(
        d_model=1024,
        num_heads=16,
        head_dim=64,
        d_ff=4096,
        num_layers=18,
        dropout=0.2,
        attention_dropout=0.2,
        share_biases=False,
        memory_len=384,
        cutoffs=(20_000, 40_000, 200_000),
        div_value=4,
        tie_projections=(False, True, True, True),
    ),
    # One Billion Word, 18 layers: perplexity 23.5 (table 4).
    # 358M parameters; the paper says 460M, which is the number with untied input and output tables.
    "lm1b-base": TransformerXLConfig(
        d_model=1024,
        num_heads=8,
        head_dim=128,
        d_ff=4096,
        num_layers=18,
        dropout=0.0,
        share_biases=False,
        memory_len=32,
        cutoffs=(60_000, 100_000, 640_000),
        div_value=4,
    ),
    # One Billion Word, 24 layers: perplexity 21.8 (table 4); sizes as in the official script. 841M parameters.
    "lm1b-large": TransformerXLConfig(
        d_model=1280,
        num_heads=16,
        head_dim=80,
        d_ff=8192,
        num_layers=24,
        dropout=0.05,
        attention_dropout=0.05,
        share_biases=False,
        memory_len=32,
        cutoffs=(60_000, 100_000, 640_000),
        div_value=4,
    ),
}
