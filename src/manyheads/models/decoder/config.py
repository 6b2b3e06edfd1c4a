"""Config and presets of the decoder-only language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.config.checks import BELOW_ONE, MOST_LAYERS, MOST_UNITS, between, check
from manyheads.models.size_checks import Activation, check_attention_options, check_heads_divide


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; the defaults are GPT-2 with 124M.

    Args:
        architecture: its name.
        vocab_size: number of ids; 0: the tokenizer's.
        d_model: width of every layer.
        num_heads: attention heads.
        head_dim: width of a head; 0: d_model / num_heads.
        num_kv_heads: heads of keys and values, each for a group of queries' heads (arXiv:2305.13245); 0: num_heads.
        d_ff: inner width of the feed-forward layers.
        num_layers: layers.
        dropout: on the sum of embeddings and positions, and on every sublayer's output.
        attention_dropout: on attention weights.
        feed_forward_dropout: between the two linear layers of the feed-forward layer.
        ffn: `mlp`: W_2 activation(W_1 x); `swiglu`: W_2 (swish(W x) * W_1 x) (arXiv:2002.05202).
        activation: of the feed-forward layers; `gelu_tanh` is GPT-2's.
        norm_position: `pre`: x + f(LN(x)), and a last norm after all layers; `post`: LN(x + f(x)).
        norm: `layer`; or `rms`, without mean and bias (arXiv:1910.07467).
        norm_eps: see norm.
        bias: biases in attention, feed-forward and norms.
        positions: `learned`; `sinusoidal`; or `rotary`: queries and keys are rotated (arXiv:2104.09864).
        rotary_base: the slowest rotation's wavelength is about 2 pi x rotary_base positions.
        rotary_scaling: for longer texts than in training: `linear` divides positions by rotary_factor, `ntk` enlarges
            rotary_base (see `nn.positions.RotaryPositions`); `none`.
        rotary_factor: see rotary_scaling.
        max_len: table size of learned positions, in tokens; other positions have no limit.
        scale_embedding: multiply embeddings by sqrt(d_model).
        tie_embeddings: the output table is the embedding's.
        head_bias: a bias on the output logits.

    Raises: ConfigError: a number is out of range or not divisible, or options contradict each other.
    """

    task: ClassVar[Literal["language-modelling"]] = "language-modelling"
    memory_degree: ClassVar[int] = 2
    draws_hashes: ClassVar[bool] = False
    hash_rounds: ClassVar[None] = None
    reads_forwards: ClassVar[bool] = True
    reads_segments_apart: ClassVar[bool] = True
    has_adaptive_softmax: ClassVar[bool] = False
    has_narrow_embeddings: ClassVar[bool] = False
    segment_multiple: ClassVar[int] = 1
    context_settings: ClassVar[dict[str, int]] = {}

    architecture: Literal["decoder"] = "decoder"
    vocab_size: int = 0
    d_model: int = 768
    num_heads: int = 12
    head_dim: int = 0
    num_kv_heads: int = 0
    d_ff: int = 3072
    num_layers: int = 12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    feed_forward_dropout: float = 0.0
    ffn: Literal["mlp", "swiglu"] = "mlp"
    activation: Activation = "gelu_tanh"
    norm_position: Literal["pre", "post"] = "pre"
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    bias: bool = True
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    rotary_base: float = 10_000.0
    rotary_scaling: Literal["none", "linear", "ntk"] = "none"
    rotary_factor: float = 1.0
    max_len: int = 1024
    scale_embedding: bool = False
    tie_embeddings: bool = True
    head_bias: bool = False

    def __post_init__(self) -> None:
        check(self, "model.", between(1, MOST_UNITS), "d_model", "num_heads", "d_ff", "max_len")
        check(self, "model.", between(1, MOST_LAYERS), "num_layers")
        check(self, "model.", between(0, MOST_UNITS), "vocab_size", "head_dim")
        check(self, "model.", BELOW_ONE, "dropout", "attention_dropout", "feed_forward_dropout", "norm_eps")
        check_heads_divide(self)
        heads, widths = {"num_heads": self.num_heads}, {"head_dim" if self.head_dim else "d_model": self.width_of_heads}
        check_attention_options(self, heads, widths)

    @property
    def width_of_heads(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def positions_from_start(self) -> bool:
        return self.positions == "learned"

    @property
    def longest_input(self) -> int | None:
        return self.max_len if self.positions == "learned" else None

    def lower_bounds(self) -> tuple[int, int]:
        return self.num_layers, self.d_model * max(self.vocab_size, self.d_ff, self.num_heads * self.width_of_heads)

    def describe(self) -> str:
        heads = (
            f"{self.num_heads} heads of {self.width_of_heads} (keys and values {self.num_kv_heads or self.num_heads})"
        )
        return (
            f"{self.num_layers} layers, d_model {self.d_model}, {heads}, d_ff {self.d_ff}, {self.positions} positions"
        )


PRESETS: dict[str, DecoderConfig] = {
    "debug": DecoderConfig(d_model=32, num_heads=4, d_ff=64, num_layers=2, attention_dropout=0.0, max_len=64),
    # The sizes of Transformer-XL's `demo`, and today's usual parts.
    "demo": DecoderConfig(
        d_model=192,
        num_heads=4,
        d_ff=512,
        num_layers=4,
        dropout=0.0,
        attention_dropout=0.0,
        ffn="swiglu",
        norm="rms",
        bias=False,
        positions="rotary",
    ),
    "gpt2": DecoderConfig(),  # the smallest of Radford et al. 2019, table 2
}
