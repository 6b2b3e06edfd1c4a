"""Configs and presets of classifiers: the encoder of the Transformer, and that of the Reformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Union

from manyheads.catalogue import ATTENTIONS
from manyheads.config.checks import MOST_LAYERS, MOST_UNITS, between, check, set_tuples
from manyheads.errors import ConfigError
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.size_checks import Activation
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.attention.settings import DotProductAttentionConfig

if TYPE_CHECKING:
    from manyheads.nn.attention.settings import AttentionConfig
else:
    AttentionConfig = Union[tuple(ATTENTIONS.values())]  # noqa: UP007  (the classes are in the table)

Pooling = Literal["mean", "first"]
"""The vector of a text: the mean of the states of its real positions, or the state of its first position."""


def check_labels(labels: Sequence[str]) -> None:
    """Raises: ConfigError: a label is empty, contains a line break or a tab, or occurs twice."""
    seen: set[str] = set()
    for label in labels:
        if not label.strip() or any(sign in label for sign in "\t\n\r"):
            raise ConfigError(
                f"model.labels contains {label!r}; a label is a text without tabs and line breaks, and not empty.",
                fields=["labels"],
            )
        if label in seen:
            raise ConfigError(f"model.labels contains {label!r} twice; name each label once.", fields=["labels"])
        seen.add(label)


@dataclass(frozen=True, kw_only=True)
class TransformerClassifierConfig:
    """The encoder of Vaswani et al. 2017 (sec. 3.1), whose states are pooled into one vector for a linear layer.

    Args:
        architecture: identifies the architecture.
        vocab_size: number of ids; 0: the tokenizer's.
        labels: the labels, in the order of the scores; empty: those of the data.
        pooling: the vector of a text: `mean` of the states of its tokens, or the state of the `first` one.
        d_model: width of every layer.
        num_heads: attention heads; d_model is divided among them.
        d_ff: inner width of the feed-forward layers.
        num_layers: layers of the encoder.
        dropout: on the sum of embeddings and positions, on every sublayer's output, and on the vector of a text.
        attention_dropout: on attention weights.
        feed_forward_dropout: between the two linear layers of the feed-forward layer.
        activation: of the feed-forward layers; `gelu` is exact, `gelu_tanh` and `quick_gelu` approximate it.
        norm_position: `post`: LN(x + f(x)) as in the paper; `pre`: x + f(LN(x)), and one more norm after the last
            layer.
        positions: `sinusoidal` (sec. 3.5), `learned`, or `none`, which needs relative_bias.
        max_len: table size of learned positions, in tokens; sinusoidal ones have no limit.
        relative_bias: self-attention adds a trained number for each head and distance to the scores, up to this
            distance; see `TransformerConfig`. 0: none.
        attention: the score function.

    Raises: ConfigError: sizes are not positive or not divisible, a rate is outside [0, 1), or a label is empty or
        occurs twice.
    """

    task: ClassVar[Literal["classification"]] = "classification"
    memory_degree: ClassVar[int] = 2

    architecture: Literal["transformer-classifier"] = "transformer-classifier"
    vocab_size: int = 0
    labels: tuple[str, ...] = ()
    pooling: Pooling = "mean"
    d_model: int = 512
    num_heads: int = 8
    d_ff: int = 2048
    num_layers: int = 6
    dropout: float = 0.1
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    activation: Activation = "relu"
    norm_position: Literal["post", "pre"] = "pre"
    positions: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    max_len: int = 1024
    relative_bias: int = 0
    attention: AttentionConfig = field(default_factory=DotProductAttentionConfig)

    def __post_init__(self) -> None:
        set_tuples(self)
        check(self, "model.", between(1, MOST_LAYERS), "num_layers")
        check(self, "model.", between(0, MOST_UNITS), "vocab_size")
        _ = self.stack  # checks the other numbers
        check_labels(self.labels)

    @property
    def stack(self) -> TransformerConfig:
        """The config of the same encoder in an encoder-decoder, from which the layers are built."""
        return TransformerConfig.of_encoder(self)

    @property
    def longest_input(self) -> int | None:
        """See `protocols.ModelConfig`: the size of the table of learned positions."""
        return self.stack.longest_input

    def lower_bounds(self) -> tuple[int, int]:
        rows = self.max_len if self.positions == "learned" else 0
        return self.num_layers, self.d_model * max(self.vocab_size, self.d_ff, self.d_model, rows)

    def describe(self) -> str:
        """Return the sizes in one line."""
        return (
            f"{self.num_layers} layers, d_model {self.d_model}, {self.num_heads} heads, d_ff {self.d_ff},"
            f" {len(self.labels)} labels"
        )


TRANSFORMERS: dict[str, TransformerClassifierConfig] = {
    # A model that learns one batch in a second or two.
    "debug": TransformerClassifierConfig(labels=("no", "yes"), d_model=32, num_heads=4, d_ff=64, num_layers=2),
    # Three layers, for minutes of training on a CPU.
    "small": TransformerClassifierConfig(d_model=128, num_heads=4, d_ff=512, num_layers=3),
}


@dataclass(frozen=True, kw_only=True)
class ReformerClassifierConfig(ReformerConfig):
    """The Reformer as an encoder in both directions, whose states are pooled into one vector for a linear layer.

    Its other settings are those of the language model; `causal`, `visible` and the chunks after a query's own have
    other defaults, so that every token attends to later ones, too.

    Args:
        architecture: identifies the architecture.
        labels: the labels, in the order of the scores; empty: those of the data.
        pooling: the vector of a text: `mean` of the states of its tokens, or the state of the `first` one.

    Raises: ConfigError: as `ReformerConfig`, or a label is empty or occurs twice.
    """

    task: ClassVar[Literal["classification"]] = "classification"  # type: ignore[assignment]

    architecture: Literal["reformer-classifier"] = "reformer-classifier"  # type: ignore[assignment]
    labels: tuple[str, ...] = ()
    pooling: Pooling = "mean"
    causal: bool = False
    visible: Literal["bucket", "chunk"] = "chunk"
    chunks_after: int = 1
    local_chunks_after: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels)

    def describe(self) -> str:
        """Return the sizes in one line."""
        return f"{super().describe()}, {len(self.labels)} labels"


REFORMERS: dict[str, ReformerClassifierConfig] = {
    # A model that learns one batch in a second or two, with local and hashed layers.
    "debug": ReformerClassifierConfig(
        labels=("no", "yes"),
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
    ),
    # Three layers for texts of up to 4,096 tokens, for minutes of training on a CPU.
    "small": ReformerClassifierConfig(
        d_model=128,
        num_heads=4,
        d_ff=512,
        num_layers=3,
        layers=("local", "lsh", "local"),
        max_len=4096,
        chunk_len=32,
        local_chunk_len=32,
        num_hashes=2,
    ),
}
