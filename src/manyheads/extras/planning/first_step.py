"""The first step of a run, which saves nothing: `manyheads train --dry-run`."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from manyheads.decoding.model_runner import choose_device
from manyheads.extras.planning import planner as measuring
from manyheads.extras.planning.planner import MIB
from manyheads.training.run.components import RunComponents, assemble
from manyheads.training.run.device import Level, computing, peak_memory_bytes, resolve_precision
from manyheads.training.run.objective import SyntheticRun, synthetic_run_of
from manyheads.training.run.resume import RunFolder
from manyheads.training.run.state import named_parameters

if TYPE_CHECKING:
    from manyheads.training.run.objective import Batch
    from manyheads.training.run.step import StepResult
    from manyheads.training.settings import RunConfig

LONGEST_STEP_SECONDS = 60.0
"""`first_step` computes no step, or part of a step, that is expected to take longer."""

_LARGE_STEP = 5e11
"""Target tokens times parameters. The time of smaller steps is not estimated: at 50 GFLOP/s they take a minute."""

_SHORT_STEPS = (1, 4)
_SHORT_ROW = 128
"""Rows and their length, of the steps from which the time of a large one is expected."""


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """A run and its first step.

    Attributes:
        config: of the run, with its precision and vocabulary sizes.
        device: of the model.
        data: a description of the data.
        shapes: name -> shape of each parameter.
        num_parameters: the sum of their sizes.
        batch: a description of each micro-batch.
        num_measured: how many micro-batches were computed, from the first on. If some were not, times are extrapolated.
        steps_per_epoch: optimiser steps.
        state_bytes: as in `planner.Footprint`.
        peak_bytes: peak memory of the step, activations included (on a CPU: of the whole process). None: no micro-batch
            was computed.
        loss: per token of the computed micro-batches. None: no micro-batch was computed.
        step_seconds: of a step after the first.
        processor_seconds: processor time of all threads in such a step. Other programs on the machine hardly change it.
        fault: why the step fails. None: it does not fail, or no micro-batch was computed.
    """

    config: RunConfig
    device: str
    data: str
    shapes: dict[str, tuple[int, ...]]
    num_parameters: int
    batch: tuple[str, ...]
    num_measured: int
    steps_per_epoch: int
    state_bytes: int
    peak_bytes: int | None
    loss: float | None
    step_seconds: float
    processor_seconds: float
    fault: str | None

    def describe(self) -> str:
        """Return all of it as text, one line each."""
        folded = _folded(self.shapes)
        width = max(len(name) for name, _ in folded)
        rows = [f"  {name:<{width}}  {text}" for name, text in folded]
        return "\n".join(
            [
                self.data,
                *rows,
                f"{self.num_parameters:,} parameters on {self.device}, {self.config.precision}",
                f"first step: {self._describe_batch()}; {self.steps_per_epoch:,} steps per epoch",
                self._describe_memory(),
                self._describe_step(),
                self.describe_time(),
                *([f"the step fails: {self.fault}"] if self.fault else []),
            ]
        )

    def _describe_batch(self) -> str:
        counts = Counter(self.batch)
        return ", ".join(text if count == 1 else f"{count} micro-batches of {text}" for text, count in counts.items())

    def _describe_memory(self) -> str:
        peak = "" if self.peak_bytes is None else f"; {self.peak_bytes / MIB:,.0f} MiB at the peak of one step"
        return f"memory: {self.state_bytes / MIB:,.0f} MiB for weights, gradients and optimiser{peak}"

    def _describe_step(self) -> str:
        times = f"{self.step_seconds:.2f} s, {self.processor_seconds:.2f} s of processor time"
        loss = "" if self.loss is None else f", loss {self.loss:.4f} per token"
        if self.num_measured == len(self.batch):
            return f"one step: {times}{loss} (nothing was saved)"
        limit = f"more than {LONGEST_STEP_SECONDS:.0f} s"
        if self.num_measured:
            how = f"only the first of {len(self.batch)} micro-batches was computed, because the step takes {limit}"
        else:
            how = f"expected from short steps and not computed, because it takes {limit}"
        return f"one step: about {times}{loss} ({how}; nothing was saved)"

    def describe_time(self) -> str:
        """Return one line: the steps, passes and time of the whole run, without its validations."""
        training = self.config.training
        seconds = max(self.step_seconds, 1e-9)
        limits = [(training.max_steps * seconds, training.max_steps)] if training.max_steps else []
        limits += (
            [(60 * training.max_minutes, int(60 * training.max_minutes / seconds))] if training.max_minutes else []
        )
        whole, steps = min(limits)
        return (
            f"the whole run: about {steps:,} steps, {steps / max(1, self.steps_per_epoch):.1f} epochs,"
            f" {_time(whole)}, and the validations"
        )


def _time(seconds: float) -> str:
    """Return a time in words, such as `5 minutes`."""
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        number = seconds / size
        if number >= 2 or (unit == "minutes" and number >= 1):
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{seconds:.3g} seconds"


def _folded(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """Return name and shape of each parameter; those that differ only in the number of their layer share a line."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, shape in shapes.items():
        text = " x ".join(map(str, shape))
        rows.setdefault((re.sub(r"\.\d+(?=\.)", ".*", name), text), []).append(name)
    return [
        (names[0], text) if len(names) == 1 else (pattern, f"{text}  ({len(names)} times)")
        for (pattern, text), names in rows.items()
    ]


def first_step(config: RunConfig, log: Callable[[str, Level], None] = lambda text, level: None) -> FirstStep:
    """Open the data of a run, build its model and compute one step, without creating or changing a run folder.

    A step of the largest presets takes an hour on a CPU. So if short steps of random ids say that it takes more than
    `LONGEST_STEP_SECONDS`, only its first micro-batch is computed, which needs the same memory; and if that takes as
    long, none.

    Args:
        config: of the run.
        log: receives messages about the precision (see `precision.resolve_precision`).

    Raises: ManyHeadsError: the errors that `train` would raise before and in its first step.
    """
    synthetic_run = synthetic_run_of(config)
    device = choose_device(config.device)
    RunFolder(Path(config.run_dir)).check()
    with tempfile.TemporaryDirectory() as aside, computing(config, device):
        config = resolve_precision(config, device, log=log)
        components = assemble(config, device, Path(aside))
        batches = components.stream.at(0, 0)
        expected = _expected_seconds(synthetic_run, components, batches)
        measured = _measurable(batches, expected[0])
        result, (seconds, processor_seconds) = _measure(components, batches, measured) if measured else (None, expected)
        peak = peak_memory_bytes(device)
        named = named_parameters(components.model)
        return FirstStep(
            config=components.config,
            device=str(device),
            data="\n".join([components.objective.describe(), *components.notes]),
            shapes={name: tuple(parameter.shape) for name, parameter in named.items()},
            num_parameters=sum(parameter.numel() for parameter in named.values()),
            batch=tuple(batch.describe() for batch in batches),
            num_measured=len(measured),
            steps_per_epoch=components.stream.rows(0),
            state_bytes=measuring.state_bytes(components.model, components.optimiser, components.average is not None),
            peak_bytes=None if result is None else peak,
            loss=None if result is None else result.loss_sum / result.num_tokens,
            step_seconds=seconds,
            processor_seconds=processor_seconds,
            fault=None if result is None or result.fault is None else str(result.fault),
        )


def _expected_seconds(
    synthetic_run: SyntheticRun, components: RunComponents, batches: Sequence[Batch]
) -> tuple[float, float]:
    """Return the time of a step and its processor time, by the line through those of two short steps of random ids.

    Returns: zeros for a step that is not large.
    """
    num_tokens = _num_tokens(batches)
    if num_tokens * sum(parameter.numel() for parameter in components.model.parameters()) < _LARGE_STEP:
        return 0.0, 0.0
    synthetic_run, train_step = replace(synthetic_run, config=components.config), components.train_step()  # type: ignore[type-var]
    length = min(_SHORT_ROW, synthetic_run.longest)
    found: dict[int, tuple[float, float]] = {}
    for rows in (_SHORT_STEPS[0], *_SHORT_STEPS):  # the first step also prepares memory and kernels
        short = [synthetic_run.batch(length, rows)]
        _, *times = _timed(partial(train_step.run, short, 1, 0.0))
        found[_num_tokens(short)] = (times[0], times[1])
        components.memory.forget()
    (few, first), (many, second) = found.items()
    seconds, processor_seconds = (
        max(b, a + max(0.0, b - a) * (num_tokens - few) / (many - few)) for a, b in zip(first, second, strict=True)
    )
    return seconds, processor_seconds


def _num_tokens(batches: Sequence[Batch]) -> int:
    return sum(batch.num_target_tokens() for batch in batches)


def _measurable(batches: Sequence[Batch], expected: float) -> Sequence[Batch]:
    """Return the micro-batches to compute: all, the first, or none.

    Args: expected: seconds of the whole step.
    """
    counts = (len(batches), 1)
    fitting = (count for count in counts if expected * count / len(batches) <= LONGEST_STEP_SECONDS)
    return batches[: next(fitting, 0)]


def _measure(
    components: RunComponents, batches: Sequence[Batch], measured: Sequence[Batch]
) -> tuple[StepResult, tuple[float, float]]:
    """Compute a step of `measured` several times at a rate of 0, so that the weights stay as they are.

    Returns: the result of the first step; and the time of a step of all batches, with the processor time of all
        threads, after the first one, which also prepares memory and kernels.
    """
    train_step = components.train_step()
    result, *_ = _timed(partial(train_step.run, measured, 1, 0.0))
    found: list[tuple[float, float]] = []
    while not found or (len(found) < 3 and sum(seconds for seconds, _ in found) < 1):
        _, *times = _timed(partial(train_step.run, measured, 2 + len(found), 0.0))
        found.append((times[0], times[1]))
    parts = _num_tokens(batches) / max(1, result.num_tokens)
    seconds, processor_seconds = (parts * median(column) for column in zip(*found, strict=True))
    return result, (seconds, processor_seconds)


def _timed(run: Callable[[], StepResult]) -> tuple[StepResult, float, float]:
    """Return the result of a step, its seconds, and its seconds of processor time."""
    started, used = time.monotonic(), time.process_time()
    result = run()
    return result, time.monotonic() - started, time.process_time() - used
