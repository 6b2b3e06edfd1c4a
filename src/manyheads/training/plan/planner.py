"""The cost of a run before it begins: the memory of a step, the largest step that fits, and one real step.

Memory is predicted from short steps on random ids. It is linear in the rows of a step, and linear or quadratic in its
length, so the polynomial through the peaks of some steps gives the peak of any other step.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from manyheads.data.progress import Progress
from manyheads.decoding.device import choose_device
from manyheads.errors import ConfigError
from manyheads.training.plan import measuring
from manyheads.training.plan.trial import Knob, Trial
from manyheads.training.run.assembly import Assembly, assemble
from manyheads.training.run.device import computing, free_memory_bytes, peak_memory_bytes
from manyheads.training.run.objective import Batch, OpenObjective
from manyheads.training.run.precision import Level, resolve_precision
from manyheads.training.run.run_folder import RunFolder
from manyheads.training.run.state import named_parameters
from manyheads.training.run.step import StepResult
from manyheads.training.settings import RunConfig

__all__ = ["FirstStep", "Fit", "Footprint", "Planner"]

LONGEST_PROBE = 8192
"""Longer steps are not measured, but extrapolated from shorter ones."""

LONGEST_STEP_SECONDS = 30.0
"""Of a step that takes longer, `Planner.first_step` computes one micro-batch."""

MIB = 2**20
_SHORT = 64
_MOST_OVERHEAD = 3.0
_SHARE = 0.9
"""The share of the free memory to use: a prediction is accurate to some percent, and other processes need memory
too."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of a training run on a CPU, in bytes.

    program_bytes: Python, torch and this package. state_bytes: weights, gradients, the optimiser's state and averages.
    step_bytes: the additional peak memory of a step. length, rows: of a micro-batch. probes: lengths of the measured
    steps. overhead: memory of a step divided by the memory of its counted tensors.
    """

    program_bytes: int
    state_bytes: int
    step_bytes: int
    length: int
    rows: int
    precision: str
    probes: tuple[int, ...]
    overhead: float = 1.0

    @property
    def total_bytes(self) -> int:
        """Peak memory of the process."""
        return self.program_bytes + self.state_bytes + self.step_bytes

    def describe(self) -> str:
        """Return a table of the parts."""
        rows = f"{self.rows:,} sequence{'s' if self.rows > 1 else ''}"
        parts = {
            "program": self.program_bytes,
            "weights, gradients, optimiser": self.state_bytes,
            f"a step of {rows} of {self.length:,} tokens": self.step_bytes,
            "together": self.total_bytes,
        }
        width = max(map(len, parts))
        lines = [f"  {name:<{width}}  {size / MIB:>10,.0f} MiB" for name, size in parts.items()]
        probes = " and ".join(f"{probe:,}" for probe in self.probes)
        head = f"peak memory of training on a CPU in {self.precision}"
        return "\n".join([head, *lines, f"measured in steps of {probes} tokens"])

    def to_json(self) -> dict[str, Any]:
        """Return the sizes by name."""
        record = asdict(self)
        probes, _ = record.pop("probes"), record.pop("overhead")
        return {**record, "total_bytes": self.total_bytes, "probed_lengths": probes}


@dataclass(frozen=True)
class Fit:
    """The largest value of a setting, and the peak memory of the process that is predicted for it."""

    knob: Knob
    value: int
    predicted_bytes: float

    def describe(self) -> str:
        """Return one line."""
        return (
            f"--{self.knob.setting} {self.value} (now {self.knob.now:,}), {self.knob.given}:"
            f" {self.predicted_bytes / MIB:,.0f} MiB predicted"
        )


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """A run and its first step. step_seconds: of a step after it. processor_seconds: processor time of all threads in
    such a step; other programs on the machine hardly change it.

    shapes: every parameter's name and shape. batch: a description of each micro-batch. num_measured: the micro-batches
    that were computed; the loss is theirs, and the times are extrapolated by target tokens. state_bytes: as in
    `Footprint`. peak_bytes: peak memory of the step, activations included (on a CPU: of the whole process). fault: the
    reason why the step fails, or None.
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
    peak_bytes: int
    loss: float
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
                f"first step: {', '.join(self.batch)}; {self.steps_per_epoch:,} steps per epoch",
                f"memory: {self.state_bytes / MIB:,.0f} MiB for weights, gradients and optimiser;"
                f" {self.peak_bytes / MIB:,.0f} MiB at the peak of one step",
                f"one step: {self.step_seconds:.2f} s, {self.processor_seconds:.2f} s of processor time, loss"
                f" {self.loss:.4f} per token (nothing was saved)",
                *self._extrapolated(),
                self.describe_time(),
                *([f"the step fails: {self.fault}"] if self.fault else []),
            ]
        )

    def _extrapolated(self) -> list[str]:
        """Return the line that says what was not computed, if there is something."""
        if self.num_measured == len(self.batch):
            return []
        return [
            f"of {len(self.batch)} micro-batches only the first was computed, because a step takes more than"
            f" {LONGEST_STEP_SECONDS:.0f} s: the loss is that of the first, and the times are extrapolated from it"
        ]

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
        if seconds >= 2 * size or (unit == "minutes" and seconds >= size):
            return f"{seconds / size:.3g} {unit}"
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


@dataclass(frozen=True)
class Planner:
    """Predicts the cost of a run.

    Attributes:
        trial: the run without its data.
        open_objective: opens the data, for `first_step`.
    """

    trial: Trial
    open_objective: OpenObjective

    def memory(self, length: int, rows: int | None = None, progress: Progress | None = None) -> Footprint:
        """Predict the peak memory of training on a CPU. Neither the run's data nor its folder is opened.

        Args:
            length: tokens of each row of a micro-batch; of pairs, of the source and of the target.
            rows: rows of a micro-batch; None: as in the config.
            progress: called after each step with the number of finished steps and the total.

        Raises: ConfigError: length or rows are out of range, or the size of the vocabulary is unknown.

        Cost: building the model and two steps for each probe.
        """
        rows = self.trial.rows if rows is None else rows
        if length < 1 or rows < 1:
            raise ConfigError(f"a length of {length} and {rows} rows are asked for; both must be at least 1.")
        trial, cpu = self.trial.at(length), torch.device("cpu")
        config = resolve_precision(trial.config, cpu)
        probes = _probe_lengths(length, config.model.memory_degree)
        with computing(config, cpu):
            told = measuring.counting_steps(progress, 2 + len(probes))
            # The first step loads libraries, whose memory counts as the program's.
            measuring.take_steps(trial, config, min(length, _SHORT), 1, told)
            program = measuring.resident_bytes()
            measuring.forget_peak()
            measuring.take_steps(trial, config, probes[-1], rows, told)
            real = measuring.peak_resident_bytes() - program
            found = [measuring.peak_and_state_bytes(trial, config, probe, rows, told) for probe in probes]
        peaks, states = zip(*found, strict=True)
        counted = _polynomial(dict(zip(probes, peaks, strict=True)), length)
        # Kernels and gaps between memory blocks are not part of the counted tensors.
        overhead = min(max(real / peaks[-1], 1.0), _MOST_OVERHEAD)
        return Footprint(
            program_bytes=program,
            state_bytes=states[0],
            step_bytes=max(0, round(counted * overhead) - states[0]),
            length=length,
            rows=rows,
            precision=config.precision,
            probes=probes,
            overhead=overhead,
        )

    def largest(self, limit_bytes: float) -> list[Fit]:
        """Return the largest settings of a training on a CPU whose peak memory stays within the limit.

        Raises: ConfigError: not even the smallest step fits.
        """
        found: dict[str, Fit] = {}
        for knob in self.trial.knobs():
            found_at = {size: self.memory(*step) for size, step in sorted(knob.steps.items())}
            # Only the counted tensors grow with the size. The rest varies from step to step, most in small steps, so a
            # polynomial through the sum of both would be useless.
            program = max(one.program_bytes for one in found_at.values())
            overhead = [one.overhead for one in found_at.values()][-1]
            peaks = {
                size: program + overhead * (one.state_bytes + one.step_bytes) / one.overhead
                for size, one in found_at.items()
            }
            fit = _largest(knob, peaks, limit_bytes)
            if knob.setting not in found or fit.value < found[knob.setting].value:
                found[knob.setting] = fit
        return list(found.values())

    def describe_largest(self, memory_mib: int | None = None) -> str:
        """Return `largest` as text. memory_mib: memory to use; None: nine tenths of the free memory.

        Raises: ConfigError: see `largest`; or this system does not report its free memory.
        """
        free = memory_mib * MIB if memory_mib else free_memory_bytes(torch.device("cpu"))
        if free is None:
            raise ConfigError("this system does not report how much memory is free; give --memory-mib N.")
        limit = free if memory_mib else _SHARE * free
        lines = [f"{free / MIB:,.0f} MiB of memory are free, {limit / MIB:,.0f} of them to be used. Largest values:"]
        return "\n".join([*lines, *(f"  {fit.describe()}" for fit in self.largest(limit))])

    def first_step(self, tell: Callable[[str, Level], None] = lambda text, level: None) -> FirstStep:
        """Open the data, build the model and compute one step, without creating or changing a run folder.

        Of a step that takes more than `LONGEST_STEP_SECONDS` only the first micro-batch is computed: on a CPU a step of
        the largest presets takes many minutes, and all its micro-batches need the same memory.

        Args: tell: receives messages about the precision (see `precision.resolve_precision`).

        Raises: ManyHeadsError: the errors that `train` would raise before and in its first step.
        """
        config = self.trial.config
        device = choose_device(config.device)
        RunFolder(Path(config.run_dir)).check()
        with tempfile.TemporaryDirectory() as aside, computing(config, device):
            config = resolve_precision(config, device, tell=tell)
            assembly = assemble(config, self.open_objective, device, Path(aside))
            batches = assembly.stream.at(0, 0)
            result, num_measured, (seconds, processor_seconds) = _measure(assembly, batches)
            peak = peak_memory_bytes(device)
            named = named_parameters(assembly.model)
            return FirstStep(
                config=assembly.config,
                device=str(device),
                data="\n".join([assembly.objective.describe(), *assembly.notes]),
                shapes={name: tuple(parameter.shape) for name, parameter in named.items()},
                num_parameters=sum(parameter.numel() for parameter in named.values()),
                batch=tuple(batch.describe() for batch in batches),
                num_measured=num_measured,
                steps_per_epoch=assembly.stream.rows(0),
                state_bytes=measuring.state_bytes(assembly.model, assembly.optimiser, assembly.average is not None),
                peak_bytes=peak,
                loss=result.loss_sum / result.num_tokens,
                step_seconds=seconds,
                processor_seconds=processor_seconds,
                fault=None if result.fault is None else str(result.fault),
            )


def _measure(assembly: Assembly, batches: Sequence[Batch]) -> tuple[StepResult, int, tuple[float, float]]:
    """Compute a step several times at a rate of 0, so that the weights stay as they are.

    Returns: the result of the first step; the number of micro-batches in it; and the time of a whole step, with the
        processor time of all threads, after the first one, which also prepares memory and kernels.
    """
    stepper = assembly.stepper()
    result, *times = _timed(lambda: stepper.take(batches[:1], 1, 0.0))
    num_measured = 1 if times[0] * len(batches) > LONGEST_STEP_SECONDS else len(batches)
    if num_measured > 1:
        assembly.memory.forget()
        result, *times = _timed(lambda: stepper.take(batches, 1, 0.0))
    measured = batches[:num_measured]
    if times[0] > LONGEST_STEP_SECONDS:  # preparations hardly count in so long a step
        found = [tuple(times)]
    else:
        found = []
        while not found or (len(found) < 3 and sum(seconds for seconds, _ in found) < 1):
            _, *times = _timed(lambda: stepper.take(measured, 2 + len(found), 0.0))
            found.append(tuple(times))
    parts = sum(batch.num_target_tokens() for batch in batches) / max(1, result.num_tokens)
    seconds, processor_seconds = (parts * median(column) for column in zip(*found, strict=True))
    return result, num_measured, (seconds, processor_seconds)


def _timed(take: Callable[[], StepResult]) -> tuple[StepResult, float, float]:
    """Return the result of a step, its seconds, and its seconds of processor time."""
    started, used = time.monotonic(), time.process_time()
    result = take()
    return result, time.monotonic() - started, time.process_time() - used


def _probe_lengths(length: int, degree: int) -> tuple[int, ...]:
    """Return lengths of steps from which the memory at a length can be extrapolated.

    Args: degree: of the polynomial (see `architectures.protocols.ModelConfig.memory_degree`).
    """
    if length <= LONGEST_PROBE:
        return (length,)
    return tuple(LONGEST_PROBE // part for part in ((2, 1) if degree == 1 else (8, 4, 2)))


def _largest(knob: Knob, peaks: Mapping[int, float], limit: float) -> Fit:
    """Return the largest value whose peak is within the limit, found by bisection."""
    least = _polynomial(peaks, knob.least)
    if least > limit:
        raise ConfigError(
            f"Not even the smallest step fits: {least / MIB:,.0f} MiB are predicted for it, and {limit / MIB:,.0f} MiB"
            " are to be used. Take a smaller model, or more memory."
        )
    low, high = knob.least, knob.most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _polynomial(peaks, middle) <= limit else (low, middle)
    return Fit(knob, low * knob.accumulate, _polynomial(peaks, low))


def _polynomial(points: Mapping[int, float], x: int) -> float:
    """Return the value at x of the polynomial through the points (Lagrange)."""
    total = 0.0
    for one, value in points.items():
        share = 1.0
        for other in points:
            share *= (x - other) / (one - other) if other != one else 1.0
        total += share * value
    return total
