"""Plots of learning rates over a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.figure import COLOURS, INK, as_array, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "schedule_figure", "thinned_steps"]

Curve = tuple[Sequence[int], Sequence[float]]
"""Steps, and the learning rate at each of them."""
_MOST_POINTS = 2000


def thinned_steps(last: int) -> list[int]:
    """Return the steps 1 to `last`, evenly thinned to what a picture can show."""
    count = min(last, _MOST_POINTS)
    return sorted({1 + point * (last - 1) // max(1, count - 1) for point in range(count)})


def schedule_figure(curves: Mapping[str, Curve], *, title: str = "Learning rate") -> Figure:
    """Draw one curve per schedule.

    Args: curves: name -> the curve.

    Raises: ShapeError: different numbers of steps and rates. MissingExtraError: no matplotlib.
    """
    figure = new_figure(8.5, 4.2)
    axes = figure.subplots()
    for number, (name, (steps, rates)) in enumerate(curves.items()):
        places, array = as_array(steps), as_array(rates)
        if places.shape != array.shape:
            raise ShapeError(f"{name}: {places.shape} steps for {array.shape} rates.")
        axes.plot(places, array, color=COLOURS[number % len(COLOURS)], linewidth=2.0, label=name)
    style_axes(axes, title=title, x_label="step")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    if curves:
        axes.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="best")
    return figure
