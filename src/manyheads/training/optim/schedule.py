"""Learning rates as pure functions of the step and the progress of the run, so they need no saved state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyheads.training.settings import ScheduleSettings


def noam(step: int, *, factor: float, d_model: int, warmup_steps: int) -> float:
    """Return factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5); step 0 counts as 1.

    Paper: Vaswani et al. 2017, sec. 5.3, eq. 3.
    """
    step = max(step, 1)
    return float(factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


def learning_rate(settings: ScheduleSettings, *, peak: float, d_model: int, step: int, progress: float = 0.0) -> float:
    """Return the rate for optimiser step `step`.

    Args:
        settings: the kind of schedule, and its warm-up.
        peak: highest rate; for `noam` a factor.
        d_model: width of the model; used by `noam` only.
        step: counted from 1; 0 counts as 1.
        progress: progress of the run by steps or by the clock, whichever is larger, in [0, 1].

    `cosine` and `linear` fall after the warm-up. The warm-up's fraction of the run is estimated as progress * warmup /
    step, which is exact if steps limit the run and approximate if the clock does.
    """
    step, warmup = max(step, 1), settings.warmup_steps
    if settings.kind == "noam":
        return noam(step, factor=peak, d_model=d_model, warmup_steps=warmup)
    if step <= warmup:
        return peak * step / warmup
    if settings.kind == "inverse_sqrt":
        return peak * math.sqrt(warmup / step)
    if settings.kind == "constant":
        return peak
    progress = min(max(progress, 0.0), 1.0)
    start = progress * warmup / step
    done = (progress - start) / (1 - start)
    falling = (1 + math.cos(math.pi * done)) / 2 if settings.kind == "cosine" else 1 - done
    return peak * (settings.min_ratio + (1 - settings.min_ratio) * falling)


def highest_rate(settings: ScheduleSettings, *, peak: float, d_model: int) -> float:
    """Return the highest rate of a schedule. Args: as of `learning_rate`; for `noam`, `peak` is only a factor of it."""
    if settings.kind != "noam":
        return peak
    return noam(settings.warmup_steps, factor=peak, d_model=d_model, warmup_steps=settings.warmup_steps)
