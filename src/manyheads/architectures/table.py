"""The table of architectures: a new one needs one folder and one line here.

Nothing here imports torch: `--help` reads this table.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from manyheads.architectures.reformer.config import ReformerConfig, ReformerSeq2SeqConfig
from manyheads.architectures.reformer.presets import PRESETS as REFORMER_PRESETS
from manyheads.architectures.reformer.presets import SEQ2SEQ_PRESETS
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.architectures.transformer.presets import PRESETS as TRANSFORMER_PRESETS
from manyheads.architectures.transformer_xl.config import TransformerXLConfig
from manyheads.architectures.transformer_xl.presets import PRESETS as XL_PRESETS
from manyheads.errors import ConfigError
from manyheads.extras.classification.reformer_config import PRESETS as REFORMER_CLASSIFIER_PRESETS
from manyheads.extras.classification.reformer_config import ReformerClassifierConfig
from manyheads.extras.classification.transformer_config import PRESETS as CLASSIFIER_PRESETS
from manyheads.extras.classification.transformer_config import TransformerClassifierConfig
from manyheads.extras.parsing.transformer_config import PRESETS as SPAN_PARSER_PRESETS
from manyheads.extras.parsing.transformer_config import TransformerSpanParserConfig

__all__ = ["ARCHITECTURES", "Architecture", "ModelTask", "build_model", "configs_of"]

ModelTask = Literal["translation", "language-modelling", "classification", "spans"]
"""The kind of a model: `Seq2Seq`, `LanguageModel`, `SequenceClassifier` or `SpanParser`."""


@dataclass(frozen=True)
class Architecture:
    """One line of the table.

    config: its config class, which declares all other facts (`protocols.ModelConfig`). presets: name -> config.
    builder: `folder.module.function` in this package, which turns a config into a composite.
    """

    config: type[Any]
    presets: Mapping[str, Any]
    builder: str

    @property
    def task(self) -> ModelTask:
        """Which composite it is; see `ModelTask`."""
        task: ModelTask = self.config.task
        return task

    def build(self, config: Any) -> Any:
        """Return a new composite with random weights (from torch's global generator)."""
        module, _, function = self.builder.rpartition(".")
        return getattr(importlib.import_module(f"manyheads.architectures.{module}"), function)(config)


# A config file that names no architecture means the first one for its task.
ARCHITECTURES: dict[str, Architecture] = {
    "transformer": Architecture(TransformerConfig, TRANSFORMER_PRESETS, "transformer.build.build"),
    "transformer-xl": Architecture(TransformerXLConfig, XL_PRESETS, "transformer_xl.build.build"),
    "reformer": Architecture(ReformerConfig, REFORMER_PRESETS, "reformer.build.build"),
    "reformer-seq2seq": Architecture(ReformerSeq2SeqConfig, SEQ2SEQ_PRESETS, "reformer.build.build_seq2seq"),
    "transformer-classifier": Architecture(
        TransformerClassifierConfig, CLASSIFIER_PRESETS, "transformer.classifier.build_classifier"
    ),
    "reformer-classifier": Architecture(
        ReformerClassifierConfig, REFORMER_CLASSIFIER_PRESETS, "reformer.classifier.build_classifier"
    ),
    "transformer-spans": Architecture(
        TransformerSpanParserConfig, SPAN_PARSER_PRESETS, "transformer.span_parser.build_span_parser"
    ),
}


def configs_of(task: ModelTask) -> tuple[type, ...]:
    """The config classes of all architectures for a task."""
    return tuple(entry.config for entry in ARCHITECTURES.values() if entry.task == task)


def build_model(config: Any) -> Any:
    """Return a new composite (see `ModelTask`) with random weights (from torch's global generator).

    Raises: ConfigError: the architecture is unknown, or the config cannot be built.
    """
    if config.architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {config.architecture!r} is unknown; there are {sorted(ARCHITECTURES)}.")
    return ARCHITECTURES[config.architecture].build(config)
