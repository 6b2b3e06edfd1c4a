"""Runs of classifiers. `presets.PRESETS` names them."""

from __future__ import annotations

from dataclasses import replace

from manyheads.extras.classification.labelled_settings import LabelledSettings
from manyheads.extras.classification.reformer_config import PRESETS as REFORMERS
from manyheads.extras.classification.task.settings import ClassificationConfig, ClassValidationSettings
from manyheads.extras.classification.transformer_config import PRESETS as TRANSFORMERS
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import OptimiserSettings, ScheduleSettings, TrainingSettings

__all__ = ["classifier_debug", "classifier_demo", "reformer_classifier_demo"]


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
