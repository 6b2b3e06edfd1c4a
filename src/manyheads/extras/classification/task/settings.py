"""Settings of a run that learns to classify texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, Union

from manyheads.catalogue import configs_of
from manyheads.extras.classification.labelled_settings import LabelledSettings
from manyheads.extras.classification.transformer_config import TransformerClassifierConfig
from manyheads.tasks.encoder_settings import EncoderConfig
from manyheads.training.settings import JudgingSettings

if TYPE_CHECKING:
    from manyheads.architectures.protocols import ModelConfig

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
            """How the states of a text become one vector; see `extras.classification.pooling`."""

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
        """See `RunConfig.task`."""
        return "classification"
