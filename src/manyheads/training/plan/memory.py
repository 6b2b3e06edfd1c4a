"""Prediction of a training run's memory from short steps.

All allocations of torch in a few short steps are counted. A polynomial through the peaks gives the peak at the
requested length: linear for architectures whose memory is linear in the length, quadratic for others. The counts of
tensors are exact and reproducible, the size of a process is not. The difference between the two is measured once, at
the longest of these steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from manyheads.architectures.table import build_model
from manyheads.data.progress import Progress
from manyheads.seeding import derive_seed
from manyheads.training.optim.optimiser import build_optimiser
from manyheads.training.run.device import computing, peak_memory_bytes
from manyheads.training.run.objective import Batch
from manyheads.training.run.precision import resolve_precision
from manyheads.training.run.step import Stepper

__all__ = ["Footprint", "Trial", "continued", "held_at_peak", "measure", "probe_lengths", "take_steps"]

LONGEST_PROBE = 8192
SHORT = 64
MOST_BESIDES = 3.0
TRYING = "trying steps"
STEPS = 2
"""The first step of an optimiser makes its moments; the second has them from the beginning."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of a training run on a CPU, in bytes.

    program: Python, torch and this package. state: weights, gradients and the optimiser's state. step: the additional
    peak
    memory of a step. length, rows: of a micro-batch. probes: the lengths of the measured steps.
    """

    program_bytes: int
    state_bytes: int
    step_bytes: int
    length: int
    rows: int
    precision: str
    probes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Peak memory of the process."""
        return self.program_bytes + self.state_bytes + self.step_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "length": self.length,
            "rows": self.rows,
            "precision": self.precision,
            "total_bytes": self.total_bytes,
            "program_bytes": self.program_bytes,
            "state_bytes": self.state_bytes,
            "step_bytes": self.step_bytes,
            "probed_lengths": list(self.probes),
        }


class Trial(Protocol):
    """A run whose steps can be computed at any size, without its data.

    config: of the run, with vocabulary sizes.
    """

    @property
    def config(self) -> Any: ...

    def batch(self, length: int, rows: int) -> Batch:
        """Return a micro-batch of random ids: `rows` rows of `length` tokens."""
        ...

    def begin(self, model: Any, lanes: int, seed: int) -> Any:
        """See `Objective.begin`."""
        ...


def measure(
    trial: Trial, length: int, rows: int, probes: tuple[int, ...], progress: Progress | None = None
) -> Footprint:
    """Predict the peak memory of training on a CPU.

    Args:
        trial: the run.
        length: tokens of each row of a micro-batch.
        rows: rows of a micro-batch.
        probes: lengths of the measured steps; a polynomial through them gives the requested length.
        progress: called after each step with the number of finished steps and the total.

    Cost: building the model and `STEPS` steps for each probe.
    """
    config = resolve_precision(trial.config, torch.device("cpu"))
    with computing(replace(config, device="cpu"), torch.device("cpu")):
        told = _counting(progress, STEPS * (2 + len(probes)))
        # The first step loads libraries, whose memory counts as the program's.
        take_steps(trial, config, min(length, SHORT), 1, told)
        program = _resident_bytes()
        _forget_peak()
        take_steps(trial, config, probes[-1], rows, told)
        real = _peak_resident_bytes() - program
        found = [held_at_peak(trial, config, probe, rows, told) for probe in probes]
    state = found[0][1]
    counted = continued(probes, [peak for peak, _ in found], length)
    # Kernels and gaps between memory blocks are not part of the counted tensors.
    share = min(max(real / found[-1][0], 1.0), MOST_BESIDES)
    return Footprint(
        program_bytes=program,
        state_bytes=state,
        step_bytes=max(0, round(counted * share) - state),
        length=length,
        rows=rows,
        precision=config.precision,
        probes=probes,
    )


def probe_lengths(length: int, degree: int) -> tuple[int, ...]:
    """Return lengths of steps from which the memory at a length can be extrapolated.

    Args: degree: of the polynomial (see `architectures.protocols.ModelConfig.memory_degree`).
    """
    if length <= LONGEST_PROBE:
        return (length,)
    return (
        (LONGEST_PROBE // 2, LONGEST_PROBE)
        if degree == 1
        else (LONGEST_PROBE // 8, LONGEST_PROBE // 4, LONGEST_PROBE // 2)
    )


def _counting(progress: Progress | None, total: int) -> Callable[[], None]:
    """Return a function to call after each of `total` steps."""
    if progress is None:
        return lambda: None
    progress(TRYING, 0, total)
    numbers = count(1)
    return lambda: progress(TRYING, next(numbers), total)


def held_at_peak(
    trial: Trial, config: Any, length: int, rows: int, told: Callable[[], None] | None = None
) -> tuple[int, int]:
    """Return the peak of bytes that torch allocated during `take_steps`, and the result of `take_steps`."""
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quietly():
        watched.start()
    try:
        state, average = take_steps(trial, config, length, rows, told)
    finally:
        with _quietly():
            watched.stop()
    return _peak(watched) + average, state + average


def take_steps(
    trial: Trial, config: Any, length: int, rows: int, told: Callable[[], None] | None = None
) -> tuple[int, int]:
    """Build a model and compute steps on random ids.

    Args:
        trial: creates the batch.
        config: of the run, with vocabulary sizes and its precision resolved.
        length: tokens of each row.
        rows: rows of the batch.
        told: called after each step.

    Returns: bytes of weights, gradients and optimiser; and bytes of the moving average, which a run also keeps.
    """
    torch.manual_seed(derive_seed(config.seed, "weights"))
    model: Any = build_model(config.model)
    optimiser = build_optimiser(model, config.optimiser, config.precision)
    batch = trial.batch(length, rows)
    stepper = Stepper(model, optimiser, config, torch.device("cpu"), begin=partial(trial.begin, model))
    for step in range(1, STEPS + 1):
        stepper.take([batch], step, 0.0)
        if told is not None:
            told()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    kept = sum(
        value.nbytes
        for state in optimiser.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return 2 * weights + kept, weights if config.training.ema_decay else 0


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


def _peak(watched: Any) -> int:
    """Return the largest sum of allocated minus freed bytes, in the order of time."""
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def continued(lengths: Sequence[int], values: Sequence[float], length: int) -> float:
    """Return the value of the polynomial through the points at a length (Lagrange)."""
    total = 0.0
    for i, (place, value) in enumerate(zip(lengths, values, strict=True)):
        share = 1.0
        for j, other in enumerate(lengths):
            share *= (length - other) / (place - other) if j != i else 1.0
        total += share * value
    return total


def _forget_peak() -> None:
    """Reset the process's peak memory if the system supports it."""
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("5")


def _peak_resident_bytes() -> int:
    """Return the process's peak memory since `_forget_peak`, or since its start."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return peak_memory_bytes(torch.device("cpu"))


def _resident_bytes() -> int:
    """Return the process's current memory, or its peak if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak_memory_bytes(torch.device("cpu"))
