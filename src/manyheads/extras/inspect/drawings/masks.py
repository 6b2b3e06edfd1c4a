"""Pictures of masks: which keys each query may attend to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.figure import COLOURS, INK, MUTED, as_array, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from manyheads.extras.inspect.mask_examples import MaskExample

__all__ = ["mask_record", "mask_text", "masks_figure"]

_MOST_COLUMNS = 4
_MOST_NUMBERED = 16
"""Keys whose cells still hold a number that can be read."""


def masks_figure(masks: Sequence[tuple[str, str, Any, int]], *, title: str = "Masks") -> Figure:
    """Draw one panel per mask: rows are queries, columns are keys; dark cells may be attended to.

    Args: masks: title, formula, (q_len, k_len) of True = may attend, and number of memory columns of each.

    Raises: ShapeError: there is no mask, or one has another rank. MissingExtraError: no matplotlib.
    """
    arrays = [as_array(allowed) for _, _, allowed, _ in masks]
    for array in arrays:
        if array.ndim != 2 or 0 in array.shape:
            raise ShapeError(f"a mask of shape {array.shape}; expected (q_len, k_len).")
    if not arrays:
        raise ShapeError("there is no mask to draw; give at least one.")
    columns = min(_MOST_COLUMNS, len(arrays))
    rows = math.ceil(len(arrays) / columns)
    tall = max(0.55, min(1.0, max(array.shape[0] / array.shape[1] for array in arrays)))
    figure = new_figure(3.7 * columns, (3.0 * tall + 0.9) * rows + 0.4, f"{title}: dark = may be attended to")
    for place, (name, formula, _, num_memory) in enumerate(masks):
        axes = figure.add_subplot(rows, columns, place + 1)
        _draw(axes, arrays[place], num_memory)
        style_axes(axes, grid=False)
        axes.set_title(f"{name}\n{formula}", loc="left", fontsize=9, color=INK)
        axes.set_xlabel("key j" if not num_memory else "key j: memory, then segment", fontsize=8.5, color=MUTED)
        axes.set_ylabel("query i", fontsize=8.5, color=MUTED)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def mask_record(example: MaskExample) -> dict[str, object]:
    """Return an example for JSON."""
    return {
        "kind": example.kind,
        "title": example.title,
        "formula": example.formula,
        "memory": example.num_memory,
        "allowed": example.allowed.int().tolist(),
    }


def mask_text(example: MaskExample) -> str:
    """Return an example as rows of 0 and 1; a bar separates the memory."""
    rows = [[str(value) for value in row] for row in example.allowed.int().tolist()]
    memory = example.num_memory
    lines = [" ".join([*row[:memory], *(["|"] if memory else []), *row[memory:]]) for row in rows]
    return "\n".join([f"{example.title}: {example.formula}", *(f"  {line}" for line in lines)])


def _draw(axes: Axes, allowed: Any, num_memory: int) -> None:
    q_len, k_len = allowed.shape
    axes.imshow(allowed, cmap="Blues", vmin=0.0, vmax=1.25, aspect="equal", interpolation="nearest")
    if max(q_len, k_len) <= _MOST_NUMBERED:
        for (row, column), value in np.ndenumerate(allowed):
            shade = "white" if value else MUTED
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7.5, color=shade)
        axes.set_xticks(range(k_len))
        axes.set_yticks(range(q_len))
        for edge in range(1, max(q_len, k_len)):
            if edge < q_len:
                axes.axhline(edge - 0.5, color="white", linewidth=0.8)
            if edge < k_len:
                axes.axvline(edge - 0.5, color="white", linewidth=0.8)
    if num_memory:
        axes.axvline(num_memory - 0.5, color=COLOURS[1], linewidth=1.6)
