"""Runs of comparisons with the papers: the duplication task, and Transformers without memory."""

from __future__ import annotations

from manyheads.data.settings import DUPLICATION, SegmentSettings
from manyheads.evaluation.reading import Reading
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer_xl.config import PRESETS as XLS
from manyheads.tasks.language_modelling.settings import TextConfig, TextValidationSettings
from manyheads.training.settings import (
    OptimiserSettings,
    ScheduleSettings,
    TrainingSettings,
)


def duplication() -> TextConfig:
    """The duplication task of Kitaev et al. 2020, sec. 2.1, at length 256: one layer, d_model 256, four hashes."""
    return TextConfig(
        run_dir="runs/duplication",
        precision="fp32",
        data=SegmentSettings(path=DUPLICATION, lanes=32, segment_len=256),
        model=ReformerConfig(
            d_model=256,
            num_heads=4,
            d_ff=1024,
            num_layers=1,
            layers=("lsh",),
            positions="learned",  # axial ones cannot point back by one distance across the ends of their rows
            max_len=256,
            chunk_len=32,
            num_hashes=4,
            dropout=0.0,
        ),
        optimiser=OptimiserSettings(learning_rate=1e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="constant", warmup_steps=200),
        training=TrainingSettings(
            max_steps=0, max_minutes=45.0, label_smoothing=0.0, log_every=100, save_every=500, keep=2
        ),
        validation=TextValidationSettings(every_steps=500, num_samples=0),
    )


def vanilla_lm() -> TextConfig:
    """A Transformer without memory (Al-Rfou et al. 2019): the baseline of Dai et al. 2019, on the embedded novel."""
    return TextConfig(
        run_dir="runs/vanilla-lm",
        data=SegmentSettings(lanes=16, segment_len=512),
        model=XLS["vanilla-lm"],
        optimiser=OptimiserSettings(learning_rate=1e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="cosine", warmup_steps=200),
        training=TrainingSettings(max_steps=5000, label_smoothing=0.0, log_every=20, save_every=500, keep=2),
        validation=TextValidationSettings(every_steps=500, sample_tokens=300, prompt="Raskolnikov "),
        reading=Reading(segment_len=512, memory_len=0),
    )


def vanilla_lm_64() -> TextConfig:
    """The 64 layers of Al-Rfou et al. 2019 on contexts of 512 characters, by default of the embedded novel.

    Batches of 16 contexts. Differs from the paper: Adam with the schedule of Dai et al. 2019 in place of momentum.
    """
    return TextConfig(
        run_dir="runs/vanilla-lm-64",
        data=SegmentSettings(lanes=16, segment_len=512),
        model=XLS["vanilla-lm-64"],
        optimiser=OptimiserSettings(learning_rate=2.5e-4, clip_norm=0.25),
        schedule=ScheduleSettings(kind="cosine", warmup_steps=4000),
        training=TrainingSettings(max_steps=400_000, label_smoothing=0.0, save_every=10_000, keep=2),
        validation=TextValidationSettings(every_steps=10_000, sample_tokens=300, prompt="Raskolnikov "),
        reading=Reading(segment_len=512, memory_len=0),
    )
