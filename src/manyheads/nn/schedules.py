"""The Transformer paper's learning rate; the other schedules are in `training`."""

from __future__ import annotations


def noam(step: int, *, factor: float, d_model: int, warmup_steps: int) -> float:
    """Return factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5); step 0 counts as 1.

    Paper: Vaswani et al. 2017, sec. 5.3, eq. 3.
    """
    step = max(step, 1)
    return float(factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))
