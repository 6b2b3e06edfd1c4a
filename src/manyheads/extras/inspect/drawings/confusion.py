"""The confusion matrix of a classifier as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.figure import (
    INK,
    add_colour_bar,
    as_array,
    new_figure,
    plain_text,
    slant_long,
    style_axes,
)
from manyheads.extras.inspect.drawings.fonts import legible_texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["confusion_figure"]

_MOST_NUMBERED = 30
"""Labels up to which each cell shows its count."""


def confusion_figure(counts: Any, labels: Sequence[str], *, title: str = "Confusion matrix") -> Figure:
    """Draw a cell for each pair of a right and a predicted label; its colour is the share of the row.

    Args: counts: (labels, labels), rows are right labels; labels: their names.

    Raises: ShapeError: the counts have another shape. MissingExtraError: no matplotlib.
    """
    array = as_array(counts)
    if array.shape != (len(labels), len(labels)) or not len(labels):
        raise ShapeError(
            f"counts of shape {array.shape}; expected a row and a column for each of {len(labels)} labels."
        )
    shares = array / np.maximum(array.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(0.62 * len(labels) + 2.6, 5.0, 22.0))
    figure = new_figure(side + 0.8, side, title)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    names, families = legible_texts(labels)
    axes.set_xticks(range(len(labels)), names)
    axes.set_yticks(range(len(labels)), names)
    style_axes(axes, x_label="predicted label", y_label="right label", grid=False)
    slant_long(axes.get_xticklabels())
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_fontfamily(families)
    plain_text([*axes.get_xticklabels(), *axes.get_yticklabels()])
    if len(labels) <= _MOST_NUMBERED:
        for (row, column), count in np.ndenumerate(array):
            colour = "white" if shares[row, column] > 0.55 else INK
            axes.text(column, row, f"{int(count):,}", ha="center", va="center", fontsize=8.5, color=colour)
    add_colour_bar(figure, image, axes, shrink=0.75).set_label("share of the right label", fontsize=9, color=INK)
    return figure
