"""The memory of a language model's training, and the largest step that fits, without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from manyheads.data.progress import Progress
from manyheads.data.segments import SegmentBatch
from manyheads.errors import ConfigError
from manyheads.tasks.text.objective import begin_hashing
from manyheads.tasks.text.settings import TextConfig
from manyheads.training.plan.fit import LONGEST, Fit, along, largest
from manyheads.training.plan.memory import Footprint, measure, probe_lengths

__all__ = ["TextTrial", "fit", "predict_memory"]

BYTES, PIECES = 256, 8000
_PROBE_ROWS = (1, 4)


@dataclass(frozen=True)
class TextTrial:
    """Segments of random ids; see `training.plan.memory.Trial`."""

    config: TextConfig

    def batch(self, length: int, rows: int) -> SegmentBatch:
        """See `Trial.batch`."""
        ids = torch.randint(self.config.model.vocab_size, (rows, length + 1))
        return SegmentBatch(
            tokens=ids[:, :-1],
            targets=ids[:, 1:],
            lengths=torch.full((rows,), length),
            resets=torch.zeros(rows, dtype=torch.bool),
            sample_ids=torch.arange(rows),
        )

    def begin(self, model: Any, lanes: int, seed: int) -> Any:
        """See `Trial.begin`."""
        return begin_hashing(self.config, model, lanes, seed)


def predict_memory(
    config: TextConfig, length: int, rows: int | None = None, progress: Progress | None = None
) -> Footprint:
    """Predict the peak memory of a language model's training on a CPU.

    Args:
        config: of the run; neither its data nor its folder is opened.
        length: tokens of a segment.
        rows: sequences of a micro-batch; None: the config's lanes, divided by its accumulate.
        progress: told after each step how many of all are done.

    Raises: ConfigError: the length is out of range, or the size of the vocabulary is unknown.
    """
    rows = -(-config.data.lanes // config.data.accumulate) if rows is None else rows
    if length < 1 or rows < 1:
        raise ConfigError(f"a length of {length} and {rows} rows are asked for; both must be at least 1.")
    trial = TextTrial(_filled(config, length))
    return measure(trial, length, rows, probe_lengths(length, config.model.memory_degree), progress)


def fit(config: TextConfig, limit_bytes: float) -> list[Fit]:
    """The largest number of lanes and the largest segment; see `tasks.runs.fit`."""
    return [_lanes(config, limit_bytes), _length(config, limit_bytes)]


def _lanes(config: TextConfig, limit: float) -> Fit:
    length, accumulate = config.data.segment_len, config.data.accumulate
    peaks = [predict_memory(config, length, rows).total_bytes for rows in _PROBE_ROWS]
    rows, predicted = largest(along(_PROBE_ROWS, peaks), limit, 1)
    given = f"segment_len {length:,}" + (f", accumulate {accumulate}" if accumulate > 1 else "")
    return Fit("data.lanes", rows * accumulate, config.data.lanes, given, predicted)


def _length(config: TextConfig, limit: float) -> Fit:
    now, most = config.data.segment_len, config.model.longest_input or LONGEST
    longest = max(now, 64)
    probes = [longest // 2, longest] if config.model.memory_degree == 1 else [longest // 4, longest // 2, longest]
    probes = [min(probe, most) for probe in probes]
    peaks = [predict_memory(config, probe).total_bytes for probe in probes]
    length, predicted = largest(along(probes, peaks), limit, 1, most)
    return Fit("data.segment_len", length, now, f"lanes {config.data.lanes:,}", predicted)


def _filled(config: TextConfig, length: int) -> TextConfig:
    """The config with the size of its vocabulary, and with segments of that length."""
    model, longest = config.model, config.model.longest_input
    if longest is not None and length > longest:
        raise ConfigError(
            f"--length {length:,} is above model.max_len {longest:,}, the number of positions of the model; raise it"
            " (and axial_shape with it), or give a smaller length."
        )
    if not model.vocab_size:
        known = {"bytes": BYTES + 1, "bpe": PIECES}.get(config.vocabulary.level)
        size = config.vocabulary.vocab_size or known
        if size is None:
            raise ConfigError("model.vocab_size is 0 and words are not counted yet; set it to see the memory.")
        model = replace(model, vocab_size=size)
    data = replace(config.data, segment_len=length, segment_lengths="fixed")
    reading = replace(config.reading, segment_len=min(config.reading.segment_len, length))
    return replace(config, model=model, data=data, reading=reading)
