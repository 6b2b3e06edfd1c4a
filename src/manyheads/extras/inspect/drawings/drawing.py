"""Boxes, arrows and text on a sheet measured in inches, for diagrams."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from manyheads.extras.inspect.drawings.figure import INK, MUTED, new_figure, plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LINE", "Sheet", "box_height", "wrapped"]

LINE = 0.155
"""Height of a line of small text, in inches."""
_NAME = 0.2
_PADDING = 0.13
_LETTERS_PER_INCH = 15.5
"""Of small text, at least."""
_NAME_LETTERS_PER_INCH = 12.0
"""Of a name in its usual size; a longer one is smaller."""


def wrapped(lines: Sequence[str], width: float) -> list[str]:
    """Return small text in lines that fit a box of this width."""
    letters = max(8, int((width - 0.12) * _LETTERS_PER_INCH))
    return [part for line in lines for part in textwrap.wrap(line, letters, break_long_words=True)]


def box_height(name: str, lines: Sequence[str], width: float) -> float:
    """Return the height of a box in inches."""
    return _PADDING + _NAME * bool(name) + LINE * len(wrapped(lines, width))


class Sheet:
    """A diagram whose shapes are collected first and drawn when its size is known. y grows upwards."""

    def __init__(self) -> None:
        self._patches: list[tuple[float, float, float, float, str, float, bool]] = []
        self._lines: list[tuple[list[tuple[float, float]], bool, str, float]] = []
        self._texts: list[tuple[float, float, str, dict[str, Any]]] = []

    def box(
        self, x: float, y: float, width: float, name: str, lines: Sequence[str] = (), *, colour: str, copies: int = 1
    ) -> float:
        """Draw a box with its left lower corner at (x, y). Returns: its height. copies: boxes behind it."""
        shown = wrapped(lines, width)
        height = box_height(name, lines, width)
        for behind in range(min(copies, 4) - 1, 0, -1):
            self._patches.append((x + 0.05 * behind, y + 0.05 * behind, width, height, colour, 0.8, False))
        self._patches.append((x, y, width, height, colour, 0.8, False))
        top = y + height - _PADDING / 2
        if name:
            size = min(9.5, 9.5 * (width - 0.1) * _NAME_LETTERS_PER_INCH / len(name))
            self.text(x + width / 2, top - _NAME / 2, name, size=size, weight="bold")
            top -= _NAME
        for number, line in enumerate(shown):
            self.text(x + width / 2, top - LINE * (number + 0.5), line, size=8)
        return height

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """Draw a light box around others."""
        self._patches.append((x, y, width, height, "#f3f5f7", 1.0, True))

    def circle(self, x: float, y: float, label: str = "+") -> None:
        """Draw a small operation."""
        self._patches.append((x - 0.09, y - 0.09, 0.18, 0.18, "circle", 0.8, False))
        self.text(x, y, label, size=10)

    def arrow(self, *points: tuple[float, float], colour: str = INK, width: float = 1.0) -> None:
        """Draw an arrow through these points."""
        self._lines.append((list(points), True, colour, width))

    def line(self, *points: tuple[float, float], colour: str = INK, width: float = 1.0) -> None:
        """Draw a line through these points."""
        self._lines.append((list(points), False, colour, width))

    def text(self, x: float, y: float, text: str, *, size: float = 8, colour: str = INK, **more: Any) -> None:
        """Write text centred at a point, unless `more` says otherwise (ha, va, weight)."""
        self._texts.append((x, y, text, {"ha": "center", "va": "center", "fontsize": size, "color": colour, **more}))

    def note(self, x: float, y: float, text: str, **more: Any) -> None:
        """Write small muted text."""
        self.text(x, y, text, **{"size": 8, "colour": MUTED, "ha": "left", **more})

    def figure(self, left: float, bottom: float, right: float, top: float) -> Figure:
        """Return the figure of this part of the sheet. Raises: MissingExtraError: no matplotlib."""
        figure = new_figure(right - left, top - bottom)
        from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
        from matplotlib.path import Path

        figure.set_layout_engine("none")  # everything has its place
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(left, right)
        axes.set_ylim(bottom, top)
        for order, (x, y, width, height, colour, edge, is_frame) in enumerate(self._patches):
            z = order * 1e-3 + (0 if is_frame else 4)
            if colour == "circle":
                axes.add_patch(Circle((x + 0.09, y + 0.09), 0.09, facecolor="white", edgecolor=INK, zorder=z))
                continue
            style = f"round,pad=0,rounding_size={0.1 if is_frame else 0.05}"
            axes.add_patch(
                FancyBboxPatch(
                    (x, y),
                    width,
                    height,
                    boxstyle=style,
                    facecolor=colour,
                    edgecolor=MUTED if is_frame else INK,
                    linewidth=edge,
                    zorder=z,
                )
            )
        for points, has_head, colour, width in self._lines:
            axes.add_patch(
                FancyArrowPatch(
                    path=Path(points),
                    arrowstyle="-|>" if has_head else "-",
                    mutation_scale=8,
                    color=colour,
                    linewidth=width,
                    shrinkA=0,
                    shrinkB=0,
                    joinstyle="round",
                    capstyle="butt",
                    zorder=2,
                )
            )
        for x, y, text, how in self._texts:
            plain_text([axes.text(x, y, text, zorder=9, **how)])
        return figure
