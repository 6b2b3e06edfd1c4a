"""Settings of a run that learns to classify texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Union

from manyheads.architectures.table import configs_of
from manyheads.architectures.transformer.classifier_config import TransformerClassifierConfig
from manyheads.data.labelled_settings import LabelledSettings
from manyheads.errors import ConfigError
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import JudgingSettings, RunConfig

if TYPE_CHECKING:
    from manyheads.architectures.protocols import ClassifierConfig
else:
    ClassifierConfig = Union[configs_of("classification")]  # noqa: UP007  (the classes are in the table)

__all__ = ["ClassificationConfig", "ClassValidationSettings"]


@dataclass(frozen=True, kw_only=True)
class ClassValidationSettings(JudgingSettings):
    """How classifiers are judged: by likelihood, accuracy and macro F1 of held-out texts.

    Args:
        best_by: the score that selects the best checkpoint: `loss`, or `f1`, which is macro F1.
        num_samples: number of wrongly labelled texts that are written to samples/ and shown.
    """

    num_samples: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_by == "bleu":
            raise ConfigError(
                "validation.best_by is 'bleu', but a classifier is judged by 'loss' or 'f1'.", fields=["best_by"]
            )


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(RunConfig):
    """A classifier's run, as `TrainConfig` is a translator's.

    Raises: ConfigError: texts may be longer than the model's positions, or a setting has no meaning for labels.
    """

    data: LabelledSettings = field(default_factory=LabelledSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    model: ClassifierConfig = field(default_factory=TransformerClassifierConfig)
    validation: ClassValidationSettings = field(default_factory=ClassValidationSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        training = self.training
        for name, usual in (("r_drop", 0.0), ("num_sampled", 0), ("smoothing_kind", "all")):
            if getattr(training, name) != usual:
                raise ConfigError(
                    f"training.{name} is {getattr(training, name)!r}, but a classifier has labels and no tokens to"
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

    @property
    def task(self) -> Literal["classification"]:
        """See `RunConfig.task`."""
        return "classification"
