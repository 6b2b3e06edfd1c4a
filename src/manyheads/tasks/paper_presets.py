"""Runs of language models with the sizes of the papers. `presets.PRESETS` names them."""

from __future__ import annotations

from manyheads.architectures.reformer.presets import PRESETS as REFORMERS
from manyheads.architectures.transformer_xl.presets import PRESETS as XLS
from manyheads.data.settings import SegmentSettings
from manyheads.evaluation.reading import Reading
from manyheads.tasks.text.settings import TextConfig, TextValidationSettings
from manyheads.training.settings import OptimiserSettings, ScheduleSettings, TrainingSettings


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


def million() -> TextConfig:
    """A Reformer that reads the embedded novel, 1,044,000 bytes, as one sequence. A step takes minutes and 16 GiB.

    The memory follows from steps of 16,384 and 32,768 bytes in fp32, as `train` allocates; bf16 takes less.
    """
    return TextConfig(
        run_dir="runs/million",
        data=SegmentSettings(lanes=1, segment_len=1 << 20),
        model=REFORMERS["million"],
        optimiser=OptimiserSettings(learning_rate=1e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="constant", warmup_steps=10),
        training=TrainingSettings(max_steps=100, label_smoothing=0.0, log_every=1, save_every=5, keep=2),
        validation=TextValidationSettings(every_steps=20, num_samples=0),
        reading=Reading(segment_len=1 << 20, lanes=1),
    )


def enwik8() -> TextConfig:
    """A Reformer for enwik8 in sequences of 65,536 bytes (Kitaev et al. 2020, sec. 5): a batch of 8, 20K steps.

    Set data.path to the prepared corpus. Schedule and optimiser are those of `imagenet64`.
    """
    return TextConfig(
        run_dir="runs/enwik8",
        data=SegmentSettings(path="data/enwik8", lanes=8, segment_len=65_536, accumulate=8),
        model=REFORMERS["enwik8"],
        optimiser=OptimiserSettings(learning_rate=1.0),
        schedule=ScheduleSettings(kind="noam", warmup_steps=8000),
        training=TrainingSettings(max_steps=20_000, label_smoothing=0.0, save_every=1000),
        validation=TextValidationSettings(every_steps=1000),
        reading=Reading(segment_len=65_536, lanes=1),
    )


def imagenet64() -> TextConfig:
    """A Reformer for ImageNet64 (Kitaev et al. 2020, sec. 5): pictures of 12,288 bytes, a batch of 8.

    Set data.path to the prepared pictures. The optimiser and its schedule are those of trax
    (`configs/reformer_imagenet64.gin`).
    """
    return TextConfig(
        run_dir="runs/imagenet64",
        data=SegmentSettings(
            path="data/imagenet64", lanes=8, segment_len=12_288, documents="separate", order="shuffled", accumulate=8
        ),
        model=REFORMERS["imagenet64"],
        optimiser=OptimiserSettings(learning_rate=1.0),
        schedule=ScheduleSettings(kind="noam", warmup_steps=8000),
        training=TrainingSettings(max_steps=500_000, label_smoothing=0.0, save_every=1000),
        validation=TextValidationSettings(every_steps=1000),
        reading=Reading(segment_len=12_288, lanes=8, documents="separate"),
    )
