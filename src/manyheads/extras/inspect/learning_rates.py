"""Learning rates over a run, as `inspect schedule` draws them: of presets, and of the Transformer's paper."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.catalogue import PRESETS
from manyheads.config.suggest import not_among
from manyheads.errors import ConfigError
from manyheads.extras.inspect.drawings.schedules import Curve, thinned_steps
from manyheads.nn.schedules import noam
from manyheads.training.optim.schedule import learning_rate

__all__ = ["rates_of_paper", "rates_of_presets"]


def rates_of_paper(widths: Sequence[int], warmups: Sequence[int], num_steps: int | None = None) -> dict[str, Curve]:
    """Return a curve for each width with each warm-up (Vaswani et al. 2017, sec. 5.3). num_steps: None: 20,000."""
    steps = thinned_steps(num_steps or 20_000)
    return {
        f"width {width}, warm-up {warmup:,}": (
            steps,
            [noam(step, factor=1.0, d_model=width, warmup_steps=warmup) for step in steps],
        )
        for width in widths
        for warmup in warmups
    }


def rates_of_presets(names: Sequence[str], num_steps: int | None = None) -> dict[str, Curve]:
    """Return the curve of each preset. num_steps: None: the preset's.

    Raises: ConfigError: there is no such preset, or it has no number of steps.
    """
    curves: dict[str, Curve] = {}
    for name in names:
        if name not in PRESETS:
            raise ConfigError(not_among("there is no preset", name, PRESETS))
        config = PRESETS[name]()
        last = num_steps or config.training.max_steps
        if not last:
            raise ConfigError(f"preset {name} has a time limit and no number of steps; give --steps.")
        of_run = {"peak": config.optimiser.learning_rate, "d_model": config.model.d_model}
        steps = thinned_steps(last)
        rates = [learning_rate(config.schedule, **of_run, step=step, progress=step / last) for step in steps]
        curves[name] = (steps, rates)
    return curves
