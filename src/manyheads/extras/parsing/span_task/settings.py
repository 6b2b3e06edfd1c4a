"""Settings of a run that learns to parse by scores of spans, of its trees and batches, and complete runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from manyheads.data.settings import RowSettings
from manyheads.extras.classification.settings import EncoderConfig
from manyheads.extras.parsing.transformer_config import PRESETS as TRANSFORMERS
from manyheads.extras.parsing.transformer_config import TransformerSpanParserConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import JudgingSettings, OptimiserSettings, ScheduleSettings, TrainingSettings

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
