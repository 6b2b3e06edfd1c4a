"""Settings of a run that learns to classify texts, of its data, and the presets of such runs.

`EncoderConfig` is what they share with runs of chart parsers: an encoder with one head is learned.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from manyheads.config.files import model_choice
from manyheads.data.settings import RowSettings
from manyheads.errors import ConfigError
from manyheads.extras.classification.config import REFORMERS, TRANSFORMERS, TransformerClassifierConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import (
    JudgingSettings,
    OptimiserSettings,
    RunConfig,
    ScheduleSettings,
    TrainingSettings,
)

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
