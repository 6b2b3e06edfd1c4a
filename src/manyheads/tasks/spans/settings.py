"""Settings of a run that learns to parse by scores of spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from manyheads.architectures.transformer.span_parser_config import TransformerSpanParserConfig
from manyheads.data.span_settings import SpanSettings
from manyheads.errors import ConfigError
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import JudgingSettings, RunConfig

__all__ = ["SpanConfig", "SpanValidationSettings"]


@dataclass(frozen=True, kw_only=True)
class SpanValidationSettings(JudgingSettings):
    """How chart parsers are judged: by likelihood, labelled F1 and exact matches of held-out trees.

    Args:
        best_by: the score that selects the best checkpoint: `loss`, or `f1` of labelled brackets.
        num_samples: number of trees that are written to samples/ and shown.
    """

    num_samples: int = 2
    best_by: Literal["loss", "bleu", "f1"] = "f1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_by == "bleu":
            raise ConfigError(
                "validation.best_by is 'bleu', but a parser is judged by 'loss' or 'f1'.", fields=["best_by"]
            )


@dataclass(frozen=True, kw_only=True)
class SpanConfig(RunConfig):
    """A chart parser's run, as `TrainConfig` is a translator's.

    Raises: ConfigError: sentences may be longer than the model's positions, or a setting has no meaning for spans.
    """

    data: SpanSettings = field(default_factory=SpanSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    model: TransformerSpanParserConfig = field(default_factory=TransformerSpanParserConfig)
    validation: SpanValidationSettings = field(default_factory=SpanValidationSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, usual in (("r_drop", 0.0), ("num_sampled", 0), ("smoothing_kind", "all")):
            if getattr(self.training, name) != usual:
                raise ConfigError(
                    f"training.{name} is {getattr(self.training, name)!r}, but a chart parser has spans and no tokens"
                    f" to predict; set it to {usual!r}.",
                    fields=["training"],
                )
        if self.data.max_len > self.model.max_len:
            raise ConfigError(
                f"data.max_len is {self.data.max_len:,}, but the model has {self.model.max_len:,} positions"
                " (model.max_len); lower the first, or raise the second.",
                fields=("data", "model"),
            )

    @property
    def task(self) -> Literal["spans"]:
        """See `RunConfig.task`."""
        return "spans"
