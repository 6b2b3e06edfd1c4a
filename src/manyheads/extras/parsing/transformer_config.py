"""Config and presets of the Transformer's encoder as a chart parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.config.checks import BELOW_ONE, MOST_LAYERS, MOST_UNITS, at_least, between, check, set_tuples
from manyheads.errors import ConfigError
from manyheads.models.size_checks import Activation
from manyheads.models.transformer.config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class TransformerSpanParserConfig:
    """A parser over spans: Kitaev and Klein 2018, arXiv:1805.01052, with features of words in place of a tagger.

    Args:
        architecture: identifies the architecture.
        vocab_size: number of ids of subwords; 0: the tokenizer's.
        num_affixes: rows of the table of hashed beginnings, endings and shapes of words.
        constituents: the labels, in the order of the scores; empty: those of the data.
        tags: the tags of words; empty: those of the data.
        root: the label at the top of every tree; empty: that of the data.
        d_model: width of every layer.
        num_heads: attention heads; d_model is divided among them.
        d_ff: inner width of the feed-forward layers.
        num_layers: layers of the encoder.
        span_dim: width inside the head.
        window: each word's vector first gets a function of the vectors of so many words around it, itself included; 1:
            no such layer.
        dropout: on the vectors of words, and on every sublayer's output.
        attention_dropout: on attention weights.
        feed_forward_dropout: between the two linear layers of the feed-forward layer.
        feature_dropout: probability that a feature of a word is not read in training.
        span_dropout: inside the head.
        tag_weight: of the loss of tags, beside that of spans.
        activation: of the feed-forward layers.
        norm_position: `pre`: x + f(LN(x)), and one more norm after the last layer; `post`: LN(x + f(x)).
        max_len: longest sentence in words.
        relative_bias: self-attention adds a trained number for each head and distance to the scores, up to this
            distance; see `TransformerConfig`. 0: none.

    Raises: ConfigError: sizes are not positive or not divisible, d_model is odd, a rate is outside [0, 1), window is
        even, or a label or tag is empty or occurs twice.
    """

    task: ClassVar[Literal["spans"]] = "spans"
    memory_degree: ClassVar[int] = 2

    architecture: Literal["transformer-spans"] = "transformer-spans"
    vocab_size: int = 0
    num_affixes: int = 8192
    constituents: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    root: str = ""
    d_model: int = 192
    num_heads: int = 4
    d_ff: int = 512
    num_layers: int = 3
    span_dim: int = 192
    window: int = 3
    dropout: float = 0.2
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    feature_dropout: float = 0.2
    span_dropout: float = 0.2
    tag_weight: float = 1.0
    activation: Activation = "relu"
    norm_position: Literal["post", "pre"] = "pre"
    max_len: int = 256
    relative_bias: int = 0

    def __post_init__(self) -> None:
        set_tuples(self)
        check(self, "model.", between(1, MOST_UNITS), "span_dim", "num_affixes")
        check(self, "model.", between(1, 1_000), "max_len")
        check(self, "model.", between(1, 15), "window")
        check(self, "model.", between(1, MOST_LAYERS), "num_layers")
        check(self, "model.", between(0, MOST_UNITS), "vocab_size")
        _ = self.stack  # checks the other numbers
        check(self, "model.", at_least(0), "tag_weight")
        check(self, "model.", BELOW_ONE, "feature_dropout", "span_dropout")
        if self.d_model % 2:
            raise ConfigError(f"model.d_model is {self.d_model}; it must be even, because a state has two halves.")
        if not self.window % 2:
            raise ConfigError(
                f"model.window is {self.window}; it must be odd: as many words on either side, and the word."
            )
        for name in ("constituents", "tags"):
            names = getattr(self, name)
            if len(set(names)) < len(names) or not all(one.strip() for one in names):
                raise ConfigError(f"model.{name} has an empty name, or one twice: {', '.join(names)}.")

    @property
    def stack(self) -> TransformerConfig:
        """The config of the same encoder in an encoder-decoder, from which the layers are built."""
        return TransformerConfig.of_encoder(self)

    @property
    def longest_input(self) -> int | None:
        return self.max_len

    def lower_bounds(self) -> tuple[int, int]:
        rows = max(self.vocab_size, self.num_affixes, self.d_ff, self.max_len)
        return self.num_layers, self.d_model * rows

    def describe(self) -> str:
        """Return the sizes in one line."""
        return (
            f"{self.num_layers} layers, d_model {self.d_model}, {self.num_heads} heads, d_ff {self.d_ff},"
            f" {len(self.constituents)} labels, {len(self.tags)} tags"
        )


PRESETS: dict[str, TransformerSpanParserConfig] = {
    # A model that learns one batch in a second or two.
    "debug": TransformerSpanParserConfig(
        constituents=("NP", "S", "S VP"),
        tags=("DT", "NN", "VB"),
        root="ROOT",
        d_model=32,
        d_ff=64,
        num_layers=2,
        span_dim=32,
    ),
    # Three layers, for minutes of training on a CPU.
    "small": TransformerSpanParserConfig(relative_bias=16),
}
