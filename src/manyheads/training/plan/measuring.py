"""The memory and the rate of training steps, measured in this process.

All allocations of torch in a step are counted. These counts are exact and reproducible; the size of the process is not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from manyheads.catalogue import build_model
from manyheads.data.lines import Progress
from manyheads.seeding import derive_seed
from manyheads.training.optim.optimiser import build_optimiser
from manyheads.training.plan.trial import Trial
from manyheads.training.run.device import check_capacity, computing, peak_memory_bytes, status_bytes
from manyheads.training.run.step import Stepper

_ENOUGH_SECONDS = 1.5
_MOST_STEPS = 8


R = TypeVar("R")

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

    Returns: the bytes of weights, gradients, moments and averages; and the bytes of the averages alone, which are not
        allocated here.
    """
    check_capacity(config, config.model, torch.device("cpu"))
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
    trial: Trial, config: Any, length: int, rows: int, told: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Return the peak of the bytes that torch allocates during `take_steps`, and the bytes of the state; both with
    averages.
    """
    (state, averages), most = peak_bytes(lambda: take_steps(trial, config, length, rows, told))
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


def tokens_per_second(trial: Trial, length: int, rows: int, device: torch.device) -> float:
    """Take training steps on random ids, and return their tokens per second (of pairs, those of one side).

    The first step is not counted, because it also prepares memory and kernels.

    Args:
        trial: of a run with its precision and vocabulary sizes resolved.
        length: tokens of each row.
        rows: rows of a step.
        device: of the run.

    Cost: two to nine steps; it ends after the step at which 1.5 seconds have passed.
    """
    config = trial.config
    with computing(config, device):
        torch.manual_seed(config.seed)
        model: Any = build_model(config.model).to(device)
        optimiser = build_optimiser(model, config.optimiser, config.precision)
        stepper = Stepper(model, optimiser, config, device, begin=partial(trial.begin, model))
        batch = trial.batch(length, rows)
        seconds: list[float] = []
        while len(seconds) < 2 or (sum(seconds[1:]) < _ENOUGH_SECONDS and len(seconds) <= _MOST_STEPS):
            started = time.monotonic()
            stepper.take([batch], len(seconds) + 1, 0.0)
            seconds.append(time.monotonic() - started)
    return length * rows / max(median(seconds[1:]), 1e-9)
