"""Plot of a language model's loss by memory length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from manyheads.extras.inspect.drawings.figure import COLOURS, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["memory_figure"]


def memory_figure(memory_lens: Sequence[int], losses: Sequence[float], *, unit: str, title: str) -> Figure:
    """Draw one point per memory length.

    Args:
        memory_lens: memory lengths, in tokens per layer.
        losses: loss at each, in nats or bits.
        unit: unit of the losses.
        title: the text that was read.

    Raises: MissingExtraError: no matplotlib.
    """
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    points = sorted(zip(memory_lens, losses, strict=True))
    lens, values = [length for length, _ in points], [loss for _, loss in points]
    axes.plot(lens, values, color=COLOURS[0], linewidth=2.0, marker="o", markersize=5)
    for length, value in points:
        axes.annotate(
            f"{value:.3f}", (length, value), (6, 6), textcoords="offset points", fontsize=8, color=INK, ha="left"
        )
    style_axes(axes, title=title, x_label="memory, tokens per layer", y_label=unit)
    axes.margins(y=0.18)
    return figure
