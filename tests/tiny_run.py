"""A run of a few steps with everything in it that a checkpoint must know: accumulation, dropout, EMA, patience."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyheads.checkpoint.format import Checkpoint, load_checkpoint
from manyheads.data.settings import DataSettings, SegmentSettings
from manyheads.decoding.settings import DecodingSettings
from manyheads.evaluation.reading import Reading
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.language_modelling.settings import TextConfig, TextValidationSettings
from manyheads.tasks.translation.settings import TrainConfig, ValidationSettings
from manyheads.text.settings import TokenizerSettings
from manyheads.training.run.resume import find_checkpoint
from manyheads.training.settings import OptimiserSettings, ScheduleSettings, TrainingSettings

TINY = TrainConfig(
    precision="fp32",
    run_dir="runs/tiny",
    num_threads=1,
    data=DataSettings(
        path="copy-task", max_tokens=96, max_source_len=16, max_target_len=16, accumulate=2, num_train_pairs=40
    ),
    tokenizer=TokenizerSettings(kind="word", vocab_size=32),
    model=TransformerConfig(d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1, num_decoder_layers=1, dropout=0.2),
    optimiser=OptimiserSettings(learning_rate=3e-3, clip_norm=1.0, weight_decay=0.01, name="adamw"),
    schedule=ScheduleSettings(kind="cosine", warmup_steps=3),
    training=TrainingSettings(
        max_steps=9, log_every=2, save_every=2, keep=2, ema_decay=0.9, plots=False, tensorboard=False
    ),
    validation=ValidationSettings(every_steps=3, bleu_sentences=2, num_samples=1, patience=5),
    decoding=DecodingSettings(num_beams=1, max_len_offset=4),
)


TINY_TEXT = TextConfig(
    precision="fp32",
    run_dir="runs/tiny-text",
    num_threads=1,
    data=SegmentSettings(lanes=6, segment_len=8, segment_lengths="varied", accumulate=2),
    model=TransformerXLConfig(
        d_model=8, num_heads=2, d_ff=8, num_layers=2, memory_len=12, dropout=0.2, attention_dropout=0.1
    ),
    optimiser=TINY.optimiser,
    schedule=TINY.schedule,
    training=replace(TINY.training, label_smoothing=0.0),
    validation=TextValidationSettings(every_steps=3, sample_tokens=6, patience=5),
    reading=Reading(segment_len=16, memory_len=8, lanes=2, max_tokens=200),
)


TINY_REFORMER = replace(
    TINY_TEXT,
    run_dir="runs/tiny-reformer",
    data=SegmentSettings(lanes=4, segment_len=24, segment_lengths="varied", accumulate=2),
    model=ReformerConfig(
        d_model=8, num_heads=2, d_ff=8, num_layers=2, layers=("local", "lsh"), max_len=48, chunk_len=4,
        local_chunk_len=4, num_hashes=2, dropout=0.2, attention_dropout=0.1,
    ),
    reading=Reading(segment_len=16, lanes=2, max_tokens=200),
)  # fmt: skip


def tiny(**sections: Any) -> TrainConfig:
    """The config with changes: sections are given as dicts."""
    return changed(TINY, **sections)


def changed(config: Any, **sections: Any) -> Any:
    """A config with changes: sections are given as dicts."""
    for name, changes in sections.items():
        new = replace(getattr(config, name), **changes) if isinstance(changes, dict) else changes
        config = replace(config, **{name: new})
    return config


def echo(texts: list[str], stop: Callable[[], bool]) -> list[str]:
    """A search that takes no time."""
    return texts


def outcome(run: Path) -> dict[str, bytes]:
    """Every byte of a finished run that must not depend on interruptions, and the counters without the clock's."""
    newest = sorted(path for path in (run / "checkpoints").iterdir() if path.is_dir())[-1]
    paths = [run / "metrics.jsonl", run / "config.yaml", run / "checkpoints" / "latest", run / "checkpoints" / "best"]
    paths += [*(run / "model").iterdir(), *(run / "samples").iterdir(), *newest.glob("*.safetensors")]
    found = {str(path.relative_to(run)): path.read_bytes() for path in paths}
    scalars = json.loads((newest / "scalars.json").read_bytes())["scalars"]
    assert scalars["counters"].pop("elapsed_seconds") > 0
    del scalars["config"]["training"]["on_save_error"]  # which may change, and config.yaml is compared as well
    return {**found, "scalars": json.dumps(scalars, sort_keys=True).encode()}


def choose_checkpoint(place: Path, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that a run would go on from, and the warnings about those that it passes over."""
    path, warnings = find_checkpoint(place, resume)
    return (None if path is None else load_checkpoint(path, verify=False)), warnings
