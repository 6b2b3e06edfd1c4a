"""Configs of classifiers, an encoder of the Transformer or of the Reformer, and settings of their runs; presets.

`EncoderConfig` is what they share with runs of chart parsers: an encoder with one head is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Union

from manyheads.catalogue import ATTENTIONS
from manyheads.config.checks import MOST_LAYERS, MOST_UNITS, between, check, set_tuples
from manyheads.config.files import model_choice
from manyheads.data.settings import RowSettings
from manyheads.errors import ConfigError
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.size_checks import Activation
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.attention.settings import DotProductAttentionConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import (
    JudgingSettings,
    OptimiserSettings,
    RunConfig,
    ScheduleSettings,
    TrainingSettings,
)

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


if TYPE_CHECKING:
    from manyheads.models.protocols import ModelConfig

    class ClassifierConfig(ModelConfig, Protocol):
        """Facts about a classifier."""

        @property
        def vocab_size(self) -> int:
            """Number of ids; 0: that of the data."""

        @property
        def labels(self) -> tuple[str, ...]:
            """The labels, in the order of the head's scores; empty: those of the data."""

        @property
        def pooling(self) -> str:
            """How the states of a text become one vector; see `model.TextPooling`."""

else:
    ClassifierConfig = model_choice("classification")

TATOEBA_LANGUAGES = "embedded:tatoeba-languages"
"""The sentences of the embedded pairs, each labelled with its language, en or de."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(RunConfig):
    """The settings of a run of such a model (`TrainConfig` is the same for translators).

    predicts: what the model predicts, for messages.

    Raises: ConfigError: rows may be longer than the model's positions, or a setting is for models that predict tokens.
    """

    predicts: ClassVar[str]

    data: RowSettings
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    model: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, usual in (("num_sampled", 0), ("smoothing_kind", "all")):
            if getattr(self.training, name) != usual:
                raise ConfigError(
                    f"training.{name} is {getattr(self.training, name)!r}, but {self.predicts} and no tokens to"
                    f" predict; set it to {usual!r}.",
                    fields=["training"],
                )
        longest = self.model.longest_input
        if longest is not None and self.data.max_len > longest:
            raise ConfigError(
                f"data.max_len is {self.data.max_len:,}, but the model has {longest:,} positions (model.max_len); lower"
                " the first, or raise the second.",
                fields=("data", "model"),
            )


@dataclass(frozen=True, kw_only=True)
class LabelledSettings(RowSettings):
    """Labelled text and batches.

    Args:
        path: a folder written by `manyheads prepare --task classification`, or `embedded:tatoeba-languages`: English
            and German sentences with their language.
        max_tokens: size of one optimiser step: rows x longest text, with padding and EOS, over all micro-batches and
            ranks.
        accumulate: number of micro-batches per optimiser step.
        max_len: maximum length of a training text in tokens, including EOS.
        too_long: for longer training texts: `truncate` them (EOS is kept), `drop` them, or `fail`. They are always
            counted.
        pad_to_multiple: pad batches to a multiple of this number of tokens, but not beyond max_len.

    Raises: ConfigError: a number is out of range.
    """

    row = "text"
    unit = "tokens"
    remedy = "truncate or drop"

    path: str = TATOEBA_LANGUAGES
    too_long: Literal["truncate", "drop", "fail"] = "truncate"


@dataclass(frozen=True, kw_only=True)
class ClassValidationSettings(JudgingSettings):
    """How classifiers are judged: by likelihood, accuracy and macro F1 of held-out texts.

    Args:
        best_by: the score that selects the best checkpoint: `loss`, or `f1`, which is macro F1.
        num_samples: number of wrongly labelled texts that are written to samples/ and shown.
    """

    judged = "a classifier"
    scores = ("loss", "f1")

    num_samples: int = 3


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(EncoderConfig):
    """A classifier's run."""

    predicts = "a classifier has labels"

    data: LabelledSettings = field(default_factory=LabelledSettings)
    model: ClassifierConfig = field(default_factory=TransformerClassifierConfig)
    validation: ClassValidationSettings = field(default_factory=ClassValidationSettings)

    @property
    def task(self) -> Literal["classification"]:
        return "classification"


def classifier_debug() -> ClassificationConfig:
    """A classifier's run in seconds on a CPU: two small layers, twenty steps, English or German."""
    return ClassificationConfig(
        run_dir="runs/classifier-debug",
        precision="fp32",
        num_threads=1,
        data=LabelledSettings(max_tokens=512, max_len=64, accumulate=2),
        tokenizer=TokenizerSettings(vocab_size=500),
        model=replace(TRANSFORMERS["debug"], labels=()),
        optimiser=OptimiserSettings(learning_rate=3e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="inverse_sqrt", warmup_steps=10),
        training=TrainingSettings(max_steps=20, log_every=5, save_every=10, ema_decay=0.99, keep=2),
        validation=ClassValidationSettings(every_steps=10, num_samples=2),
    )


def classifier_demo() -> ClassificationConfig:
    """A classifier in three minutes on two cores: the embedded sentences, English or German, or your own texts."""
    return ClassificationConfig(
        run_dir="runs/classifier-demo",
        data=LabelledSettings(max_tokens=2048, max_len=256, pad_to_multiple=2),
        model=TRANSFORMERS["small"],
        optimiser=OptimiserSettings(name="muon", learning_rate=3e-3, muon_learning_rate=0.01, clip_norm=1.0),
        schedule=ScheduleSettings(kind="linear", warmup_steps=50),
        training=TrainingSettings(max_steps=0, max_minutes=3.0, log_every=20, save_every=500, keep=2),
        validation=ClassValidationSettings(every_steps=200, best_by="f1"),
    )


def reformer_classifier_demo() -> ClassificationConfig:
    """`classifier-demo` with a Reformer's encoder, for texts of up to 4,096 tokens."""
    config = classifier_demo()
    return replace(
        config,
        run_dir="runs/reformer-classifier-demo",
        data=replace(config.data, max_tokens=4096, max_len=4096),
        model=REFORMERS["small"],
    )
