"""Config and presets of the Transformer's encoder as a chart parser.

Settings of a run that learns to parse by scores of spans, of its trees and batches, and complete runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from manyheads.config.checks import BELOW_ONE, MOST_LAYERS, MOST_UNITS, at_least, between, check, set_tuples
from manyheads.data.settings import RowSettings
from manyheads.errors import ConfigError
from manyheads.extras.classification.settings import EncoderConfig
from manyheads.models.size_checks import Activation
from manyheads.models.transformer.config import TransformerConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import JudgingSettings, OptimiserSettings, ScheduleSettings, TrainingSettings


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
            raise ConfigError(
                f"model.d_model is {self.d_model}; it must be even, because a state has two halves.", fields=["d_model"]
            )
        if not self.window % 2:
            raise ConfigError(
                f"model.window is {self.window}; it must be odd: as many words on either side, and the word.",
                fields=["window"],
            )
        for name in ("constituents", "tags"):
            names = getattr(self, name)
            if len(set(names)) < len(names) or not all(one.strip() for one in names):
                problem = f"model.{name} has an empty name, or one twice: {', '.join(names)}."
                raise ConfigError(problem, fields=[name])

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


TRANSFORMERS: dict[str, TransformerSpanParserConfig] = {
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


MOST_WORDS = 1_000
"""Maximum length of a sentence that a chart is computed for: time grows with its cube, memory with its square."""


@dataclass(frozen=True, kw_only=True)
class SpanSettings(RowSettings):
    """Trees and batches.

    Args:
        path: a folder written by `manyheads prepare --task spans`.
        max_tokens: size of one optimiser step: rows x longest sentence in words, over all micro-batches and ranks.
        accumulate: number of micro-batches per optimiser step.
        max_len: maximum length of a training sentence in words.
        too_long: for longer training sentences: `drop` or `fail`. They are always counted.
        pad_to_multiple: pad batches to a multiple of this number of words, but not beyond max_len.

    Raises: ConfigError: a number is out of range.
    """

    row = "sentence"
    unit = "words"
    remedy = "drop"
    most_len = MOST_WORDS

    max_tokens: int = 1024
    too_long: Literal["drop", "fail"] = "drop"


@dataclass(frozen=True, kw_only=True)
class SpanValidationSettings(JudgingSettings):
    """How chart parsers are judged: by likelihood, labelled F1 and exact matches of held-out trees.

    Args:
        best_by: the score that selects the best checkpoint: `loss`, or `f1` of labelled brackets.
        num_samples: number of trees that are written to samples/ and shown.
    """

    judged = "a parser"
    scores = ("loss", "f1")

    num_samples: int = 2
    best_by: Literal["loss", "bleu", "f1"] = "f1"


@dataclass(frozen=True, kw_only=True)
class SpanConfig(EncoderConfig):
    """A chart parser's run."""

    predicts = "a chart parser has spans"

    data: SpanSettings = field(default_factory=SpanSettings)
    model: TransformerSpanParserConfig = field(default_factory=TransformerSpanParserConfig)
    validation: SpanValidationSettings = field(default_factory=SpanValidationSettings)

    @property
    def task(self) -> Literal["spans"]:
        return "spans"


def chart_debug() -> SpanConfig:
    """A chart parser's run in seconds on a CPU, on your own trees: two small layers, twenty steps."""
    return SpanConfig(
        run_dir="runs/chart-debug",
        precision="fp32",
        num_threads=1,
        data=SpanSettings(max_tokens=256, max_len=64),
        model=replace(TRANSFORMERS["debug"], constituents=(), tags=(), root=""),
        optimiser=OptimiserSettings(learning_rate=3e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="inverse_sqrt", warmup_steps=10),
        training=TrainingSettings(max_steps=20, log_every=5, save_every=10, ema_decay=0.9, keep=2),
        validation=SpanValidationSettings(every_steps=10),
    )


def chart_parser() -> SpanConfig:
    """A chart parser in twenty minutes, on your own trees; the settings of recipes/gum-chart-parsing.yaml."""
    return SpanConfig(
        run_dir="runs/chart-parser",
        data=SpanSettings(max_tokens=1500, max_len=250),
        tokenizer=TokenizerSettings(vocab_size=3000, lowercase=True),
        model=TRANSFORMERS["small"],
        optimiser=OptimiserSettings(name="muon", learning_rate=3e-3, muon_learning_rate=0.02, clip_norm=1.0),
        schedule=ScheduleSettings(kind="linear", warmup_steps=50),
        training=TrainingSettings(max_steps=0, max_minutes=20.0, log_every=50, save_every=250, ema_decay=0.995, keep=2),
        validation=SpanValidationSettings(every_steps=250),
    )
