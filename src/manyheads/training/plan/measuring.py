"""The memory of training steps, measured in this process.

All allocations of torch in a step are counted. The counts of tensors are exact and reproducible, the size of the
process is not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from manyheads.architectures.table import build_model
from manyheads.data.progress import Progress
from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed
from manyheads.training.optim.optimiser import build_optimiser
from manyheads.training.plan.trial import Trial
from manyheads.training.run.device import peak_memory_bytes
from manyheads.training.run.step import Stepper

__all__ = [
    "counting_steps",
    "forget_peak",
    "free_bytes",
    "peak_and_state_bytes",
    "peak_resident_bytes",
    "resident_bytes",
    "state_bytes",
    "take_steps",
]

_STEPS = 2
"""The first step of an optimiser creates its moments; the second has them from the beginning."""

_STATUS = "/proc/self/status"


def take_steps(
    trial: Trial, config: Any, length: int, rows: int, told: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Build a model and compute two steps on random ids.

    Args:
        trial: creates the batch.
        config: of the run, with vocabulary sizes and its precision resolved.
        length: tokens of each row.
        rows: rows of the batch.
        told: called after each step.

    Returns: bytes of weights, gradients, moments and averages; and those of the averages, which do not exist here.
    """
    torch.manual_seed(derive_seed(config.seed, "weights"))
    model: Any = build_model(config.model)
    optimiser = build_optimiser(model, config.optimiser, config.precision)
    batch = trial.batch(length, rows)
    stepper = Stepper(model, optimiser, config, torch.device("cpu"), begin=partial(trial.begin, model))
    for step in range(1, _STEPS + 1):
        stepper.take([batch], step, 0.0)
        told()
    bare = state_bytes(model, optimiser)
    whole = state_bytes(model, optimiser, averages=bool(config.training.ema_decay))
    return whole, whole - bare


def counting_steps(progress: Progress | None, num_trials: int) -> Callable[[], None]:
    """Return a function to call after each step of so many calls of `take_steps`."""
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
    trial: Trial, config: Any, length: int, rows: int, told: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Return the peak of the bytes that torch allocates during `take_steps`, and the bytes of the state; both with
    averages.
    """
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quietly():
        watched.start()
    try:
        state, averages = take_steps(trial, config, length, rows, told)
    finally:
        with _quietly():
            watched.stop()
    recorded: Any = watched.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most + averages, state


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
    return _reported(_STATUS, "VmHWM") or peak_memory_bytes(torch.device("cpu"))


def resident_bytes() -> int:
    """Return the process's current memory, or its peak if the system does not report it."""
    return _reported(_STATUS, "VmRSS") or peak_memory_bytes(torch.device("cpu"))


def free_bytes() -> int:
    """Return the memory available to a new process, within the limits of the container.

    Raises: ConfigError: this system does not report it.
    """
    free = _reported("/proc/meminfo", "MemAvailable")
    found = [] if free is None else [free]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # `max` means no limit and raises ValueError
        found.append(limit - int((group / "memory.current").read_text(encoding="ascii")))
    if not found:
        with suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if not found:
        raise ConfigError("this system does not report how much memory is free; give --memory-mib N.")
    return max(0, min(found))


def _reported(file: str, name: str) -> int | None:
    """Return the bytes of a line such as `VmRSS:  12 kB`; None if the system has no such file or line."""
    with suppress(OSError, ValueError, IndexError), open(file, encoding="ascii") as lines:  # noqa: PTH123
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    return None
