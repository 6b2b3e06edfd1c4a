"""The memory of a run before it begins, and the largest step that fits.

All allocations of torch in a step are counted. These counts are exact and reproducible; the size of the process is not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError
from manyheads.nn.kernels.modes import as_if_longer
from manyheads.seeding import derive_seed
from manyheads.training.optim.optimiser import build_optimiser
from manyheads.training.run.device import (
    check_capacity,
    computing,
    free_memory_bytes,
    peak_memory_bytes,
    resolve_precision,
    status_bytes,
)
from manyheads.training.run.objective import SizeSetting, SyntheticRun, synthetic_run_of
from manyheads.training.run.step import TrainStep

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.training.settings import RunConfig

_ENOUGH_SECONDS = 1.5
_MOST_STEPS = 8


R = TypeVar("R")

_STEPS = 2
"""The first step of an optimiser creates its moments; the second has them from the beginning."""

_STATUS = "/proc/self/status"


def take_steps(
    synthetic_run: SyntheticRun, config: Any, length: int, rows: int, on_progress: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Build a model and compute two steps on random ids.

    Args:
        synthetic_run: creates the batch.
        config: of the run, with vocabulary sizes and its precision resolved.
        length: tokens of each row.
        rows: rows of the batch.
        on_progress: called after each step.

    Returns: the bytes of weights, gradients, moments and averages; and the bytes of the averages alone, which are not
        allocated here.
    """
    check_capacity(config, config.model, torch.device("cpu"))
    torch.manual_seed(derive_seed(config.seed, "weights"))
    model: Any = build_model(config.model)
    optimiser = build_optimiser(model, config.optimiser, config.precision)
    batch = synthetic_run.batch(length, rows)
    train_step = TrainStep(model, optimiser, config, torch.device("cpu"), begin=partial(synthetic_run.begin, model))
    for step in range(1, _STEPS + 1):
        train_step.run([batch], step, 0.0)
        on_progress()
    bare = state_bytes(model, optimiser)
    whole = state_bytes(model, optimiser, averages=bool(config.training.ema_decay))
    return whole, whole - bare


def counting_steps(progress: Progress | None, num_trials: int) -> Callable[[], None]:
    """Return a function to call after each step, when `take_steps` is called this many times."""
    if progress is None:
        return lambda: None
    phase, total, numbers = "trying steps", _STEPS * num_trials, count(1)
    progress(phase, 0, total)
    return lambda: progress(phase, next(numbers), total)


def state_bytes(model: nn.Module, optimiser: torch.optim.Optimizer, averages: bool = False) -> int:
    """Return the bytes of weights, gradients, moments and, if there are any, averages. Call it after a step."""
    parameters = list(model.parameters())
    moments = (value for parameter in parameters for value in optimiser.state.get(parameter, {}).values())
    return (2 + averages) * sum(parameter.nbytes for parameter in parameters) + sum(
        moment.nbytes
        for moment in moments
        if isinstance(moment, torch.Tensor) and moment.dim()  # not counts of steps
    )


def peak_and_state_bytes(
    synthetic_run: SyntheticRun, config: Any, length: int, rows: int, on_progress: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Return the peak of the bytes that torch allocates during `take_steps`, and the bytes of the state; both with
    averages.
    """
    (state, averages), most = peak_bytes(lambda: take_steps(synthetic_run, config, length, rows, on_progress))
    return most + averages, state


def peak_bytes(run: Callable[[], R]) -> tuple[R, int]:
    """Return what `run` returns, and the peak of the bytes that torch allocates on the CPU while it runs."""
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quietly():
        watched.start()
    try:
        returned = run()
    finally:
        with _quietly():
            watched.stop()
    recorded: Any = watched.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return returned, most


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress what torch's profiler writes to standard error, below Python, when it starts and stops."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def forget_peak() -> None:
    """Reset the process's peak memory if the system supports it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_resident_bytes() -> int:
    """Return the process's peak memory since `forget_peak`, or since its start."""
    return status_bytes(_STATUS, "VmHWM") or peak_memory_bytes(torch.device("cpu"))


def resident_bytes() -> int:
    """Return the process's current memory, or its peak if the system does not report it."""
    return status_bytes(_STATUS, "VmRSS") or peak_memory_bytes(torch.device("cpu"))


def tokens_per_second(synthetic_run: SyntheticRun, length: int, rows: int, device: torch.device) -> float:
    """Take training steps on random ids, and return their tokens per second (of pairs, those of one side).

    The first step is not counted, because it also prepares memory and kernels.

    Args:
        synthetic_run: of a run with its precision and vocabulary sizes resolved.
        length: tokens of each row.
        rows: rows of a step.
        device: of the run.

    Cost: two to nine steps; it ends after the step at which 1.5 seconds have passed.
    """
    config = synthetic_run.config
    with computing(config, device):
        torch.manual_seed(config.seed)
        model: Any = build_model(config.model).to(device)
        optimiser = build_optimiser(model, config.optimiser, config.precision)
        train_step = TrainStep(model, optimiser, config, device, begin=partial(synthetic_run.begin, model))
        batch = synthetic_run.batch(length, rows)
        seconds: list[float] = []
        while len(seconds) < 2 or (sum(seconds[1:]) < _ENOUGH_SECONDS and len(seconds) <= _MOST_STEPS):
            started = time.monotonic()
            train_step.run([batch], len(seconds) + 1, 0.0)
            seconds.append(time.monotonic() - started)
    return length * rows / max(median(seconds[1:]), 1e-9)


LONGEST_PROBE = 8192
"""Longer steps are not measured, but extrapolated from shorter ones."""

MIB = 2**20
_SHORT = 64
_MOST_OVERHEAD = 3.0
_MOST_GAPS = 1 << 29
"""Two blocks of 256 MiB, from which on a block is returned (`cli.process`). Preset million, fp32: 0.2, 0.2, 0.6 and 0.5
GiB beside its tensors in steps of 8,192, 65,536, 131,072 and 262,144 tokens."""
_SHARE = 0.9
"""The share of the free memory to use: a prediction is accurate to some percent, and other processes need memory
too."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of a training run on a CPU, in bytes.

    program_bytes: Python, torch and this package. state_bytes: weights, gradients, the optimiser's state and averages.
    step_bytes: the additional peak memory of a step. length, rows: of a micro-batch. probes: lengths of the measured
    steps. overhead: memory of a step divided by the memory of its counted tensors. vocabulary: see `SyntheticRun`.
    """

    program_bytes: int
    state_bytes: int
    step_bytes: int
    length: int
    rows: int
    precision: str
    probes: tuple[int, ...]
    overhead: float = 1.0
    vocabulary: str = ""

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
        told = [self.vocabulary] if self.vocabulary else []
        return "\n".join([head, *lines, f"measured in steps of {probes} tokens", *told])

    def to_json(self) -> dict[str, Any]:
        """Return the sizes by name."""
        record = asdict(self)
        probes, _ = record.pop("probes"), record.pop("overhead")
        return {**record, "total_bytes": self.total_bytes, "probed_lengths": probes}


@dataclass(frozen=True)
class Fit:
    """The largest value of a setting, and the peak memory of the process that is predicted for it."""

    size_setting: SizeSetting
    value: int
    predicted_bytes: float

    def describe(self) -> str:
        """Return one line."""
        return (
            f"--{self.size_setting.setting} {self.value} (now {self.size_setting.now:,}), {self.size_setting.given}:"
            f" {self.predicted_bytes / MIB:,.0f} MiB predicted"
        )


@dataclass(frozen=True)
class Planner:
    """Predicts the memory of a run.

    Attributes:
        config: of the run.
    """

    config: RunConfig

    @property
    def synthetic_run(self) -> SyntheticRun:
        """The run without its data."""
        return synthetic_run_of(self.config)

    def memory(self, length: int, rows: int | None = None, progress: Progress | None = None) -> Footprint:
        """Predict the peak memory of training on a CPU. Neither the run's data nor its folder is opened.

        Args:
            length: tokens of each row of a micro-batch; of pairs, of the source and of the target.
            rows: rows of a micro-batch; None: as in the config.
            progress: called after each step with the number of finished steps and the total.

        Raises: ConfigError: length or rows are out of range, or the size of the vocabulary is unknown.

        Cost: building the model and two steps for each probe.
        """
        rows = self.synthetic_run.rows if rows is None else rows
        if length < 1 or rows < 1:
            raise ConfigError(f"a length of {length} and {rows} rows are asked for; both must be at least 1.")
        synthetic_run, cpu = self.synthetic_run.at(length), torch.device("cpu")
        config = resolve_precision(synthetic_run.config, cpu)
        probes = _probe_lengths(length, config.model.memory_degree)
        with computing(config, cpu):
            told = counting_steps(progress, 2 + len(probes))
            # The first step loads libraries, whose memory counts as the program's.
            take_steps(synthetic_run, config, min(length, _SHORT), 1, told)
            program = resident_bytes()
            forget_peak()
            with as_if_longer(length / probes[-1]):
                take_steps(synthetic_run, config, probes[-1], rows, told)
            real = peak_resident_bytes() - program
            found = []
            for probe in probes:
                with as_if_longer(length / probe):
                    found.append(peak_and_state_bytes(synthetic_run, config, probe, rows, told))
        peaks, states = zip(*found, strict=True)
        counted = _polynomial(dict(zip(probes, peaks, strict=True)), length)
        # Kernels and gaps between memory blocks are not part of the counted tensors.
        gaps = counted * min(max(real / peaks[-1] - 1.0, 0.0), _MOST_OVERHEAD - 1.0)
        if length > probes[-1]:
            gaps = min(gaps, max(real - peaks[-1], _MOST_GAPS))
        overhead = 1.0 + gaps / counted
        return Footprint(
            program_bytes=program,
            state_bytes=states[0],
            step_bytes=max(0, round(counted * overhead) - states[0]),
            length=length,
            rows=rows,
            precision=config.precision,
            probes=probes,
            overhead=overhead,
            vocabulary=synthetic_run.vocabulary,
        )

    def largest(self, limit_bytes: float) -> list[Fit]:
        """Return the largest settings of a training on a CPU whose peak memory stays within the limit.

        Raises: ConfigError: not even the smallest step fits.
        """
        found: dict[str, Fit] = {}
        for size_setting in self.synthetic_run.size_settings():
            found_at = {size: self.memory(*step) for size, step in sorted(size_setting.steps.items())}
            # Only the counted tensors grow with the size. The rest varies from step to step, most in small steps, so a
            # polynomial through the sum of both would be useless.
            program = max(one.program_bytes for one in found_at.values())
            overhead = [one.overhead for one in found_at.values()][-1]
            peaks = {
                size: program + overhead * (one.state_bytes + one.step_bytes) / one.overhead
                for size, one in found_at.items()
            }
            fit = _largest(size_setting, peaks, limit_bytes)
            if size_setting.setting not in found or fit.value < found[size_setting.setting].value:
                found[size_setting.setting] = fit
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
        told = self.synthetic_run.at(self.synthetic_run.longest).vocabulary
        return "\n".join([*lines, *(f"  {fit.describe()}" for fit in self.largest(limit)), *filter(None, [told])])


def _probe_lengths(length: int, degree: int) -> tuple[int, ...]:
    """Return lengths of steps from which the memory at a length can be extrapolated.

    Args: degree: of the polynomial (see `models.protocols.ModelConfig.memory_degree`).
    """
    if length <= LONGEST_PROBE:
        return (length,)
    return tuple(LONGEST_PROBE // part for part in ((2, 1) if degree == 1 else (8, 4, 2)))


def _largest(size_setting: SizeSetting, peaks: Mapping[int, float], limit: float) -> Fit:
    """Return the largest value whose peak is within the limit, found by bisection."""
    least = _polynomial(peaks, size_setting.least)
    if least > limit:
        raise ConfigError(
            f"Not even the smallest step fits: {least / MIB:,.0f} MiB are predicted for it, and {limit / MIB:,.0f} MiB"
            " are to be used. Take a smaller model, or more memory."
        )
    low, high = size_setting.least, size_setting.most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _polynomial(peaks, middle) <= limit else (low, middle)
    return Fit(size_setting, low * size_setting.accumulate, _polynomial(peaks, low))


def _polynomial(points: Mapping[int, float], x: int) -> float:
    """Return the value at x of the polynomial through the points (Lagrange)."""
    total = 0.0
    for one, value in points.items():
        share = 1.0
        for other in points:
            share *= (x - other) / (one - other) if other != one else 1.0
        total += share * value
    return total
