"""Heat maps of attention weights, for one head or all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import RequestError, ShapeError
from manyheads.extras.inspect.drawings.attention_views import AttentionView, thinned
from manyheads.extras.inspect.drawings.figure import (
    COLOURS,
    INK,
    MUTED,
    Array,
    add_colour_bar,
    as_array,
    new_figure,
    plain_text,
    slant_long,
    style_axes,
)
from manyheads.extras.inspect.drawings.fonts import legible_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["attention_figure", "layer_figure", "view_figure"]

MAX_LABELS = 40
"""If an axis has more tokens than this, only every second, third ... token is labelled."""
MAX_SMALL_LABELS = 16
"""The same limit if one of many heads is drawn."""
MAX_FLAT_CHARS = 70
"""Characters of all labels together that have space below the columns of a picture; more are rotated."""


def attention_figure(
    weights: Any,
    *,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    title: str = "",
    query_name: str = "query",
    key_name: str = "key",
    mean: bool = True,
    num_memory: int = 0,
) -> Figure:
    """Draw one heat map per head with a common colour scale; rows are queries, columns are keys.

    For long sequences the colours show the square root of the weights, and the scale says so. Otherwise a few large
    weights, as in the first rows of a causal model, would make all others invisible.

    Args:
        weights: (q_len, k_len), or (heads, q_len, k_len).
        query_tokens: a label per row; key_tokens: a label per column.
        mean: show the mean of all heads first, and larger.
        num_memory: number of memory columns at the left, which a line separates from the others.

    Raises: ShapeError: weights of another rank, or a wrong number of labels. MissingExtraError: no matplotlib.
    """
    array = as_array(weights)
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or 0 in array.shape:
        raise ShapeError(f"attention weights of shape {array.shape}; expected (q_len, k_len) or (heads, q_len, k_len).")
    num_heads, q_len, k_len = array.shape
    for tokens, length, name in ((query_tokens, q_len, "query"), (key_tokens, k_len, "key")):
        if tokens is not None and len(tokens) != length:
            raise ShapeError(f"{len(tokens)} {name} tokens for weights with {length} {name} positions.")
    mean = mean and num_heads > 1
    columns = 1 if num_heads == 1 else min(4, math.ceil(math.sqrt(num_heads)))
    rows = math.ceil(num_heads / columns)
    cell_height = float(np.clip(0.22 * q_len, 1.7, 6.0)) if rows < 3 else 2.2
    cell_width = cell_height * float(np.clip(k_len / q_len, 0.6, 1.8))
    main = max(4.2, cell_height * rows) if mean or num_heads == 1 else 0.0
    main_width = main * float(np.clip(k_len / q_len, 0.6, 1.6))
    width = main_width + (cell_width * columns if num_heads > 1 else 0.0) + 1.9
    figure = new_figure(min(width, 24.0), min(max(main, cell_height * rows) + 1.7, 22.0), title)
    top, by_root = float(np.nanmax(array)) or 1.0, k_len > MAX_LABELS
    panels = _panels(figure, num_heads, rows, columns, mean, main_width / max(cell_width * columns, 0.1))
    image = None
    for panel, axes in panels:
        image = _heat_map(axes, array.mean(axis=0) if panel == "mean" else array[int(panel)], top, by_root)
        if num_memory:
            axes.axvline(num_memory - 0.5, color=COLOURS[1], linewidth=1.2)
        large = panel == "mean" or num_heads == 1
        name = "mean of all heads" if panel == "mean" else ("" if num_heads == 1 else f"head {int(panel) + 1}")
        style_axes(axes, title=name, grid=False)
        for side in axes.spines.values():
            side.set_visible(False)
        if large:
            axes.set_xlabel(key_name, fontsize=10, color=MUTED)
            axes.set_ylabel(query_name, fontsize=10, color=MUTED)
            _label(axes, "x", key_tokens, k_len)
            _label(axes, "y", query_tokens, q_len)
        else:
            axes.set_title(name, loc="left", fontsize=9, color=INK)
            head = int(panel)
            # Tokens are shown only at the outer edges of the grid: rows at its left, columns below each column's last
            # head.
            _label(axes, "x", key_tokens if head + columns >= num_heads else None, k_len, is_small=True)
            _label(axes, "y", query_tokens if head % columns == 0 else None, q_len, is_small=True)
    if image is not None:
        bar = add_colour_bar(figure, image, [axes for _, axes in panels], shrink=0.6, aspect=30, pad=0.015)
        bar.set_label(f"attention weight{', colour by square root' if by_root else ''}", fontsize=9, color=MUTED)
    return figure


def layer_figure(view: AttentionView, layer: int) -> Figure:
    """Draw one layer of a view, counted from 1: the mean of its heads, and each of them. Raises: MissingExtraError."""
    return attention_figure(
        view.layers[layer - 1],
        query_tokens=view.query_tokens,
        key_tokens=view.key_tokens,
        num_memory=view.num_memory,
        title=f"{view.name}, layer {layer} of {len(view.layers)}",
    )


def view_figure(views: Sequence[AttentionView], name: str | None, layer: int | None, most: int) -> Figure:
    """Draw one layer of one of a model's views.

    Args:
        name: of the view; None: the last one.
        layer: counted from 1; None: the last one.
        most: maximum number of rows and columns; longer texts are thinned.

    Raises: RequestError: there is no such view or layer. MissingExtraError: no matplotlib.
    """
    named = {view.name: view for view in views}
    if name is not None and name not in named:
        raise RequestError(f"--view {name}: this model shows {', '.join(named)}.")
    view = thinned(named[name or views[-1].name], most)
    layer = len(view.layers) if layer is None else layer
    if not 1 <= layer <= len(view.layers):
        raise RequestError(f"--layer {layer}: the {view.name} has layers 1 to {len(view.layers)}.")
    return layer_figure(view, layer)


def _panels(
    figure: Figure, num_heads: int, rows: int, columns: int, mean: bool, ratio: float
) -> list[tuple[str, Axes]]:
    """Return axes for the mean and for each head. All are in one grid, because a colour bar needs a single grid."""
    if not mean:
        grid = figure.add_gridspec(rows, columns)
        return [(str(h), figure.add_subplot(grid[h // columns, h % columns])) for h in range(num_heads)]
    grid = figure.add_gridspec(rows, 1 + columns, width_ratios=[max(ratio, 0.3) * columns] + [1.0] * columns)
    panels = [("mean", figure.add_subplot(grid[:, 0]))]
    return panels + [(str(h), figure.add_subplot(grid[h // columns, 1 + h % columns])) for h in range(num_heads)]


def _heat_map(axes: Axes, weights: Array, top: float, by_root: bool) -> Any:
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5 if by_root else 1.0, vmin=0.0, vmax=top)
    return axes.imshow(weights, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")


def _label(axes: Axes, which: str, tokens: Sequence[str] | None, length: int, *, is_small: bool = False) -> None:
    """Label the positions, evenly thinned if there are too many to read.

    Args: is_small: the axes of one of many heads; without tokens they get no labels.
    """
    if is_small and tokens is None:
        axes.set_xticks([]) if which == "x" else axes.set_yticks([])
        return
    stride = math.ceil(length / (MAX_SMALL_LABELS if is_small else MAX_LABELS))
    places = list(range(0, length, stride))
    names = [_short(tokens[place]) if tokens is not None else str(place) for place in places]
    names, families = legible_texts(names)
    size = 6 if is_small else 9.5 if length <= 24 else 8 if length <= MAX_LABELS else 7
    if which == "x":
        most = MAX_FLAT_CHARS // 3 if is_small else MAX_FLAT_CHARS
        flat = (max(map(len, names)) + 1) * len(names) <= most  # the longest label fits into its column
        axes.set_xticks(places, names, ha="center", fontsize=size)
        if not flat:
            slant_long(axes.get_xticklabels())
    else:
        axes.set_yticks(places, names, fontsize=size)
    labels = axes.get_xticklabels() if which == "x" else axes.get_yticklabels()
    plain_text(labels)
    for text in labels:
        text.set_fontfamily(families)


def _short(token: str) -> str:
    shown = "".join(char if char.isprintable() or char in "\u200c\u200d" else "�" for char in token)
    return shown if len(shown) <= 16 else shown[:15] + "…"
