"""Runs of chart parsers. `presets.PRESETS` names them."""

from __future__ import annotations

from dataclasses import replace

from manyheads.extras.parsing.span_settings import SpanSettings
from manyheads.extras.parsing.span_task.settings import SpanConfig, SpanValidationSettings
from manyheads.extras.parsing.transformer_config import PRESETS as TRANSFORMERS
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import OptimiserSettings, ScheduleSettings, TrainingSettings

__all__ = ["chart_debug", "chart_parser"]


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
