"""Settings of a run that learns to parse by scores of spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from manyheads.extras.parsing.span_settings import SpanSettings
from manyheads.extras.parsing.transformer_config import TransformerSpanParserConfig
from manyheads.tasks.encoder_settings import EncoderConfig
from manyheads.training.settings import JudgingSettings

__all__ = ["SpanConfig", "SpanValidationSettings"]


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
        """See `RunConfig.task`."""
        return "spans"
