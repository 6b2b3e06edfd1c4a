"""Pictures of heads: their figures as maps, and the score by the share of heads that are pruned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.figure import (
    COLOURS,
    INK,
    MUTED,
    add_colour_bar,
    new_figure,
    plain_text,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (
    ("normalised", "Importance, by gradient", "{:.2f}"),
    ("ablation", "Nats a token more without it", "{:+.3f}"),
    ("entropy", "Entropy of the weights, bits", "{:.1f}"),
    ("offset_share", "Share of the usual distance", "{:.2f}"),
)
_MOST_NUMBERED = 12
"""Heads of a layer whose cells still hold a number that can be read."""


def heads_figure(rows: Sequence[Mapping[str, Any]], *, title: str = "Heads") -> Figure:
    """Draw four maps: layers of all stacks below each other, heads beside each other, counted from 0.

    Args: rows: one record per head: `head` (its name, such as `encoder.0.self:1`) and normalised, ablation, entropy,
        offset and offset_share, which may be None.

    Raises: MissingExtraError: no matplotlib.
    """
    layers = list(dict.fromkeys(row["head"].rpartition(":")[0] for row in rows))
    most = 1 + max(int(row["head"].rpartition(":")[2]) for row in rows)
    figure = new_figure(max(2.2 + 0.75 * most, 4.2) * 2, 1.2 + 2 * (0.9 + 0.3 * len(layers)), title)
    panels = figure.subplots(2, 2)
    for axes, (key, name, shown) in zip(panels.flat, _PANELS, strict=True):
        values = np.full((len(layers), most), np.nan)
        labels: dict[tuple[int, int], str] = {}
        for row in rows:
            layer, _, number = row["head"].rpartition(":")
            place = layers.index(layer), int(number)
            if row[key] is not None:
                values[place] = row[key]
                far = f" at {row['offset']:+d}".replace("+0", "0") if key == "offset_share" else ""
                labels[place] = shown.format(row[key]) + far
        _map(figure, axes, values, labels if most <= _MOST_NUMBERED else {})
        style_axes(axes, title=name, x_label="head", grid=False)
        axes.set_xticks(range(most), [str(number) for number in range(most)])
        axes.set_yticks(range(len(layers)), layers)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def _map(figure: Figure, axes: Axes, values: Any, labels: Mapping[tuple[int, int], str]) -> None:
    top = max(float(np.nanmax(values)), 1e-9) if not np.isnan(values).all() else 1.0
    low = min(0.0, float(np.nanmin(values))) if not np.isnan(values).all() else 0.0
    image = axes.imshow(values, cmap="Blues", vmin=low, vmax=top, aspect="auto", interpolation="nearest")
    for (row, column), label in labels.items():
        dark = values[row, column] - low > 0.6 * (top - low)
        axes.text(column, row, label, ha="center", va="center", fontsize=7.5, color="white" if dark else INK)
    add_colour_bar(figure, image, axes, pad=0.02)


def pruning_figure(points: Sequence[Mapping[str, Any]], *, note: str = "") -> Figure:
    """Draw the score by the share of pruned heads, one curve for each order of pruning.

    Args:
        points: `by`, `share` of heads that are pruned, and `bleu` or `perplexity`; an infinite one is left out.
        note: below the title.

    Raises: ShapeError: there is no point. MissingExtraError: no matplotlib.
    """
    if not points:
        raise ShapeError("there is no point to draw.")
    measure, name = ("bleu", "BLEU") if "bleu" in points[0] else ("perplexity", "Perplexity")
    figure = new_figure(7.5, 4.6, f"{name} by the share of pruned heads")
    axes = figure.subplots()
    orders = list(dict.fromkeys(point["by"] for point in points))
    for number, by in enumerate(orders):
        own = sorted((point for point in points if point["by"] == by), key=lambda point: float(point["share"]))
        shown = [(100 * point["share"], point[measure]) for point in own if math.isfinite(point[measure])]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(
            [share for share, _ in shown],
            [score for _, score in shown],
            color=colour,
            marker="o",
            markersize=4.5,
            linewidth=2.0,
            label="at random" if by == "random" else f"by {by}",
        )
        if len(orders) > 1:
            continue
        for share, score in shown:
            axes.annotate(
                f"{score:.1f}",
                (share, score),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=MUTED,
            )
    style_axes(axes, x_label="heads pruned, in percent", y_label=name)
    plain_text([axes.set_title(note, loc="left", fontsize=9, color=MUTED)])
    axes.legend(frameon=False, fontsize=8.5, loc="best")
    finite = [point[measure] for point in points if math.isfinite(point[measure])] or [0.0]
    highest = max(finite)
    if measure == "bleu":
        axes.set_ylim(bottom=0, top=1.12 * max(1.0, highest))
    elif highest > 10 * min(finite):
        axes.set_yscale("log")
    return figure
