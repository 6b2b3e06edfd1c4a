"""The measured rate of training steps on this machine."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch

from manyheads.architectures.table import build_model
from manyheads.training.optim.optimiser import build_optimiser
from manyheads.training.plan.trial import Trial
from manyheads.training.run.device import computing
from manyheads.training.run.step import Stepper

__all__ = ["tokens_per_second"]

_ENOUGH_SECONDS = 1.5
_MOST_STEPS = 8


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
