"""Plots of position encodings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import ShapeError
from manyheads.visualise.figure import COLOURS, INK, add_colour_bar, as_array, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["positions_figure"]


def positions_figure(
    table: Any,
    *,
    features: Sequence[int] | None = None,
    title: str = "Position encodings",
    place_name: str = "position",
) -> Figure:
    """Draw the table as a heat map, and some of its features as curves (as in the Annotated Transformer).

    Args:
        table: (length, d_model).
        features: columns drawn as curves; default: four neighbours a sixth of the way up.
        place_name: name of the row axis.

    Raises: ShapeError: another rank, or a feature that the table does not have. MissingExtraError: no matplotlib.
    """
    array = as_array(table)
    if array.ndim != 2 or 0 in array.shape:
        raise ShapeError(f"a position table of shape {array.shape}; expected (length, d_model).")
    length, d_model = array.shape
    if features is None:
        first = d_model // 6 // 2 * 2
        features = range(first, min(first + 4, d_model))
    if any(not 0 <= feature < d_model for feature in features):
        raise ShapeError(f"features {list(features)} of a table with d_model {d_model}.")
    figure = new_figure(11.0, 6.0, title)
    above, below = figure.subplots(2, 1, height_ratios=[1.25, 1.0], sharex=True)
    limit = float(np.abs(array).max()) or 1.0
    extent = (-0.5, length - 0.5, -0.5, d_model - 0.5)
    image = above.imshow(
        array.T, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", origin="lower", extent=extent,
        interpolation="nearest",
    )  # fmt: skip
    style_axes(above, y_label="feature", grid=False)
    add_colour_bar(figure, image, above, pad=0.01, aspect=20)
    for number, feature in enumerate(features):
        below.plot(array[:, feature], color=COLOURS[number % len(COLOURS)], linewidth=1.8, label=f"feature {feature}")
    style_axes(below, x_label=place_name, y_label="value")
    above.yaxis.get_major_locator().set_params(integer=True)
    below.xaxis.get_major_locator().set_params(integer=True)
    below.legend(
        frameon=False, fontsize=9, labelcolor=INK, ncols=len(list(features)), loc="lower right", bbox_to_anchor=(1, 1)
    )
    return figure
