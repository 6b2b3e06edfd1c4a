"""`manyheads evaluate --dry-run` of a language model: time and memory of an evaluation, from its first segments."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from manyheads.decoding.generator import Generator
from manyheads.evaluation.language_model import evaluate_text
from manyheads.evaluation.reading import Reading
from manyheads.tasks.language_modelling.held_out import HeldText, readings_of
from manyheads.tasks.language_modelling.options import EvaluateOptions
from manyheads.tasks.report import TextReport, model_line, model_record
from manyheads.training.run.device import peak_memory_bytes

TRIED_SECONDS = 30
TRIED_SEGMENTS = 5


@dataclass(frozen=True)
class TrialReport(TextReport):
    """See `tasks.report.Report`. results: a record for each reading."""

    results: list[dict[str, Any]]
    protocol: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"dry_run": self.results, "protocol": self.protocol}

    def to_lines(self) -> list[str]:
        lines = ["dry run: nothing was scored", f"  data       {self.protocol['data']}", model_line(self.protocol)]
        for one in self.results:
            lines += [
                f"  reading    {one['tokens']:,} tokens, {one['segments']:,} segments of {one['segment_len']:,} in"
                f" {one['lanes']:,} lanes, memory {one['memory_len']:,}",
                f"  time       about {_duration(one['total_seconds'])}; {one['segment_seconds']:.2f} seconds a segment,"
                f" measured on {one['measured']}{'' if one['memory_is_full'] else ' before the memory was full'}",
                f"  memory     {one['peak_bytes'] / 2**30:.2f} GiB at most so far,"
                f" {one['parameter_bytes'] / 2**30:.2f} GiB of it parameters",
            ]
        return lines


def try_reading(generator: Generator, options: EvaluateOptions, held: HeldText) -> TrialReport:
    """Score the first segments until the memory is full and some were timed, or `TRIED_SECONDS` have passed.

    Raises: DataError: there is nothing to score.
    """
    protocol = {
        "data": held.name,
        **model_record(options.model, generator.model, generator.device, generator.precision),
        **options.models.record(),
    }
    return TrialReport([_tried(generator, held, reading) for reading in readings_of(options)], protocol)


def _tried(generator: Generator, held: HeldText, reading: Reading) -> dict[str, Any]:
    attending = reading.attending(generator.model.config)
    each = attending if isinstance(attending, tuple) else (attending,)  # of an ensemble, one of each model
    memory_len = max(getattr(one, "memory_len", None) or 0 for one in each)
    starts_full = all(getattr(one, "initial_memory", "") == "zeros" for one in each)
    filling = 0 if starts_full else -(-memory_len // reading.segment_len)
    begun = time.monotonic()
    moments: list[float] = []

    def stop() -> bool:
        torch.zeros((), device=generator.device).item()  # waits until a GPU has finished
        moments.append(time.monotonic())
        enough = len(moments) > filling + TRIED_SEGMENTS or moments[-1] - begun > TRIED_SECONDS
        return enough and len(moments) > 1

    with generator.runner.inference():
        evaluate_text(
            generator.model,
            held.store,
            reading,
            generator.vocabulary,
            device=generator.device,
            stop=stop,
        )
    moments = moments if len(moments) > 1 else [begun, time.monotonic()]  # one segment was all
    times = [after - before for before, after in itertools.pairwise(moments)]
    segment_seconds = statistics.median(times[-min(TRIED_SEGMENTS, len(times)) :])
    tokens = held.num_read(reading)
    lanes = min(reading.lanes, max(tokens, 1))
    segments = -(-tokens // (lanes * reading.segment_len))
    return {
        "tokens": tokens,
        "segments": segments,
        "segment_len": reading.segment_len,
        "lanes": lanes,
        "memory_len": memory_len,
        "segment_seconds": segment_seconds,
        "total_seconds": segments * segment_seconds,
        "measured": f"{len(times)} segment{'s' if len(times) != 1 else ''}",
        "memory_is_full": len(times) > filling,
        "peak_bytes": peak_memory_bytes(generator.device),
        "parameter_bytes": sum(one.nbytes for one in generator.model.parameters()),
    }


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
