"""A map of token embeddings: points with labels that do not cover each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.attention import shown_token
from manyheads.extras.inspect.drawings.figure import (
    COLOURS,
    INK,
    MUTED,
    legible_texts,
    new_figure,
    plain_text,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LETTERS = 18
_KINDS = {
    # kind -> colour, size of the point, size of the label, what it is
    "word": (COLOURS[1], 34.0, 10.0, "asked for"),
    "neighbour": (COLOURS[0], 20.0, 8.5, "a nearest neighbour"),
    "frequent": (MUTED, 9.0, 8.0, "a frequent token"),
}
_PLACES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Positions of a label relative to its point, the best first."""
_DISTANCES = (5.0, 9.0)
"""Points from the centre of a point to its label."""


class Point(Protocol):
    """See `extras.inspect.embeddings.MapPoint`."""

    @property
    def token(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def x(self) -> float: ...
    @property
    def y(self) -> float: ...


def embedding_map_figure(points: Sequence[Point], shares: tuple[float, float], *, title: str) -> Figure:
    """Draw the points with their labels. A label that has no space is left out; requested words get theirs first.

    Args:
        points: in the order in which labels are placed within a kind.
        shares: of the variance on the two axes.

    Raises: ShapeError: there is no point. MissingExtraError: no matplotlib.
    """
    if not points:
        raise ShapeError("there is no point to draw.")
    figure = new_figure(9.5, 7.4, title)
    axes = figure.subplots()
    for order, (kind, (colour, size, _, what)) in enumerate(_KINDS.items()):
        own = [point for point in points if point.kind == kind]
        if own:
            axes.scatter(
                [point.x for point in own],
                [point.y for point in own],
                s=size,
                color=colour,
                alpha=0.9,
                linewidth=0,
                zorder=3 - 0.1 * order,
                label=what,
            )
    axes.margins(0.08)
    style_axes(
        axes,
        x_label=f"first principal component, {shares[0]:.0%} of the variance",
        y_label=f"second, {shares[1]:.0%}",
    )
    if len({point.kind for point in points}) > 1:
        axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, -0.07), ncols=3)
    # The note's space is kept before labels are placed; otherwise the points would move below their labels.
    note = axes.set_title(" ", loc="right", fontsize=8, color=MUTED)
    left_out = _label(figure, axes, points)
    if left_out:
        note.set_text(f"{left_out} of {len(points)} labels have no space and are left out")
    return figure


def _label(figure: Figure, axes: Axes, points: Sequence[Point]) -> int:
    """Place the labels. Returns: the number of labels without space."""
    order = sorted(range(len(points)), key=lambda place: list(_KINDS).index(points[place].kind))
    shown, families = legible_texts([_shortened(points[place].token) for place in order])
    figure.draw_without_rendering()  # the layout is needed to know where points are
    renderer: Any = figure._get_renderer()  # type: ignore[attr-defined]
    scale = figure.dpi / 72
    centres = axes.transData.transform([(point.x, point.y) for point in points])
    frame = axes.get_window_extent(renderer)
    radii = np.array([_KINDS[point.kind][1] ** 0.5 / 2 * scale for point in points])
    taken = np.stack([centres[:, 0] - radii, centres[:, 1] - radii, centres[:, 0] + radii, centres[:, 1] + radii], 1)
    left_out = 0
    for place, label in zip(order, shown, strict=True):
        colour, _, size, _ = _KINDS[points[place].kind]
        bold = "bold" if points[place].kind == "word" else "normal"
        text = axes.annotate(
            label,
            (points[place].x, points[place].y),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=size,
            fontfamily=families,
            fontweight=bold,
            color=colour if points[place].kind == "word" else INK,
        )
        plain_text([text])
        text.set_in_layout(False)
        box = text.get_window_extent(renderer)
        free = _free_place(centres[place], box.width, box.height, taken, frame, scale)
        if free is None:
            text.remove()
            left_out += 1
            continue
        offset, corners = free
        text.set_horizontalalignment("left")
        text.set_verticalalignment("bottom")
        text.set_position(offset)
        between = np.array([-2.0, 0, 2, 0]) * scale  # so that two words beside each other are not read as one
        taken = np.concatenate([taken, (corners + between)[None]])
    return left_out


def _free_place(
    centre: Any, width: float, height: float, taken: Any, frame: Any, scale: float
) -> tuple[tuple[float, float], Any] | None:
    """Return the first free place of a label: its offset from the point, in points, and its corners in pixels."""
    for distance in _DISTANCES:
        for across, up in _PLACES:
            gap = distance * scale * (0.75 if across and up else 1.0)
            left = centre[0] + across * gap + (across - 1) / 2 * width
            below = centre[1] + up * gap + (up - 1) / 2 * height
            corners = np.array([left, below, left + width, below + height])
            inside = frame.x0 <= left and left + width <= frame.x1 and frame.y0 <= below and below + height <= frame.y1
            hit = (
                (taken[:, 0] < corners[2])
                & (taken[:, 2] > corners[0])
                & (taken[:, 1] < corners[3])
                & (taken[:, 3] > corners[1])
            )
            if inside and not hit.any():
                return ((left - centre[0]) / scale, (below - centre[1]) / scale), corners
    return None


def _shortened(token: str) -> str:
    shown = shown_token(token)
    return shown if len(shown) <= _MOST_LETTERS else f"{shown[: _MOST_LETTERS - 1]}…"
