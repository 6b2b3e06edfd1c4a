"""The blocks of a model and the operations of its attention as diagrams, in the manner of figures 1 and 2 of "Attention
is all you need". Lengths are inches; y grows upwards.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.figure import INK, MUTED, new_figure, plain_text
from manyheads.extras.inspect.tracing import runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.extras.inspect.blocks import AttentionOperations, Block, LayerKind, ModelBlocks, Stack

_LINE, _NAME, _PADDING = 0.155, 0.2, 0.13
"""Heights: of a line of small text, of a name, of the space around both."""
_LETTERS, _NAME_LETTERS = 15.5, 12.0
"""On an inch, at least: of small text, and of a name in its usual size; a longer name is smaller."""
_WIDTH, _SIDE = 2.75, 1.75
"""Widths: of a box of a stack, of one beside it."""
_GAP, _MARGIN, _STREAM, _BETWEEN = 0.26, 0.34, 0.7, 1.0
"""Between boxes; from a frame to its boxes, with residual connections and with two streams; between stacks."""
_COLOURS = {
    **dict.fromkeys(("embedding", "features", "mask"), "#fbd9e0"),
    "attention": "#ffdfb8",
    "feed-forward": "#c5e6f2",
    **dict.fromkeys(("norm", "scale", "concat"), "#f3f0b6"),
    **dict.fromkeys(("pooling", "memory", "matmul", "distances"), "#dcd3ee"),
    "softmax": "#cfe8cf",
}
"""By a word of a box's name; the last word that occurs counts."""
_NOTE: dict[str, Any] = {"color": MUTED, "ha": "left"}
_Point = tuple[float, float]


def _wrapped(lines: Sequence[str], width: float) -> list[str]:
    """Return small text in lines that fit a box of this width."""
    letters = max(8, int((width - 0.12) * _LETTERS))
    return [part for line in lines for part in textwrap.wrap(line, letters)]


class Diagram:
    """A diagram that is cut to what was drawn. Raises: MissingExtraError: no matplotlib."""

    def __init__(self) -> None:
        self.figure = new_figure(10, 10)
        self.figure.set_layout_engine("none")  # everything has its place
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set(xlim=(0, 10), ylim=(0, 10))

    def rectangle(
        self, x: float, y: float, width: float, height: float, colour: str, edge: str = INK, order: int = 4
    ) -> None:
        """Draw a rectangle with round corners. order: 0 is behind lines."""
        from matplotlib.patches import FancyBboxPatch

        style = f"round,pad=0,rounding_size={0.05 if order else 0.1}"
        look: dict[str, Any] = {
            "boxstyle": style,
            "facecolor": colour,
            "edgecolor": edge,
            "linewidth": 0.8,
            "zorder": order,
        }
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, **look))

    def box(self, x: float, y: float, width: float, name: str, lines: Sequence[str] = (), copies: int = 1) -> float:
        """Draw a box with its left lower corner at (x, y). Returns: its height. copies: boxes behind it."""
        shown = _wrapped(lines, width)
        height = _PADDING + _NAME * bool(name) + _LINE * len(shown)
        colour = next((colour for word, colour in reversed(_COLOURS.items()) if word in name.lower()), "#e3e6ea")
        for behind in range(min(copies, 4) - 1, -1, -1):
            self.rectangle(x + 0.05 * behind, y + 0.05 * behind, width, height, colour)
        top = y + height - _PADDING / 2 - _NAME * bool(name)
        size = min(9.5, 9.5 * (width - 0.1) * _NAME_LETTERS / max(1, len(name)))
        self.text(x + width / 2, top + _NAME / 2, name, size, weight="bold")
        for number, line in enumerate(shown):
            self.text(x + width / 2, top - _LINE * (number + 0.5), line)
        return height

    def add(self, x: float, y: float) -> None:
        """Draw the sign of an addition."""
        from matplotlib.patches import Circle

        self.axes.add_patch(Circle((x, y), 0.09, facecolor="white", edgecolor=INK, zorder=4))
        self.text(x, y, "+", 10)

    def line(self, *points: _Point, head: str = "-", color: str = INK) -> None:
        """Draw a line through these points."""
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path

        look: dict[str, Any] = {"arrowstyle": head, "mutation_scale": 8, "color": color, "shrinkA": 0, "shrinkB": 0}
        self.axes.add_patch(FancyArrowPatch(path=Path(points), capstyle="butt", zorder=2, **look))

    def arrow(self, *points: _Point, color: str = INK) -> None:
        """Draw an arrow through these points."""
        self.line(*points, head="-|>", color=color)

    def text(self, x: float, y: float, text: str, size: float = 8, **more: Any) -> None:
        """Write text centred at a point, unless `more` says otherwise."""
        if text:
            how = {"ha": "center", "va": "center", "color": INK, "fontsize": size, "zorder": 9, **more}
            plain_text([self.axes.text(x, y, text, **how)])

    def edges(self) -> tuple[float, float, float, float]:
        """Left, bottom, right and top of all boxes and texts."""
        from matplotlib.patches import FancyBboxPatch
        from matplotlib.transforms import Bbox

        drawn = [*self.axes.texts, *(one for one in self.axes.patches if isinstance(one, FancyBboxPatch))]
        found = Bbox.union([one.get_window_extent() for one in drawn]).transformed(self.axes.transData.inverted())
        return found.x0, found.y0, found.x1, found.y1

    def finish(self, title: str, below: str = "", notes: Sequence[str] = ()) -> Figure:
        """Write a title with small text under it above all, and notes below all. Returns: the figure."""
        left, bottom, right, top = self.edges()
        width = right - left
        for line in (part for note in notes for part in textwrap.wrap(note, max(24, int(width * 14)))):
            bottom -= _LINE
            self.text(left, bottom, line, **_NOTE)
        for line in reversed(textwrap.wrap(below, max(24, int(width * 13)))):
            top += _LINE * 1.1
            self.text(left, top, line, 8.5, **_NOTE)
        for line in reversed(textwrap.wrap(title, max(20, int(width * 8.5)))):
            top += 0.24
            self.text(left, top, line, 12, weight="bold", ha="left")
        left, bottom, right, top = self.edges()
        self.figure.set_size_inches(right - left + 0.3, top - bottom + 0.3)
        self.axes.set(xlim=(left - 0.15, right + 0.15), ylim=(bottom - 0.15, top + 0.15))
        return self.figure


class _StackDrawing:
    """Draws one stack from below. x: of its boxes; is_last: residuals and labels are on the right, otherwise on the
    left. crosses: the heights at which the encoder's output is read. reads: those of self-attention.
    """

    def __init__(self, diagram: Diagram, stack: Stack, x: float, *, is_last: bool) -> None:
        self.diagram, self.stack, self.x, self.is_last = diagram, stack, x, is_last
        self.centre, self.y = x + _WIDTH / 2, 0.12
        self.crosses: list[float] = []
        self.reads: list[float] = []
        streams = any(kind.blocks[0].wiring == "reversible" for kind in stack.kinds)
        self.wide = _STREAM if streams else _MARGIN
        self.streams = (x - _STREAM / 2.5, x + _WIDTH + _STREAM / 2.5) if streams else ()
        diagram.text(self.centre, -0.27, stack.name, 11, weight="bold")
        diagram.text(self.centre, 0.0, stack.reads, 9)
        for block in stack.before:
            self.plain(block)
        self._join(self.y, self.y + 1.6 * _GAP)
        for number, kind in enumerate(stack.kinds):
            self.y += _GAP * (0.8 if not streams else 0.4 if number else 1.2)
            self._layers(kind)
        self._join(self.y + _GAP, self.y)
        self.y += _GAP if streams else 0
        for block in stack.after:
            self.plain(block)

    def plain(self, block: Block) -> None:
        """Draw a block on the way up, with the shape of what it returns."""
        self._up(_GAP)
        self._box(block.name, block.lines)
        self.diagram.text(self.centre + 0.08, self.y + _GAP / 2 - 0.02, block.shape, **_NOTE)

    def _up(self, length: float) -> None:
        self.diagram.arrow((self.centre, self.y), (self.centre, self.y + length))
        self.y += length

    def _box(self, name: str, lines: Sequence[str] = ()) -> float:
        """Returns: the height of its middle."""
        height = self.diagram.box(self.x, self.y, _WIDTH, name, lines)
        self.y += height
        return self.y - height / 2

    def _join(self, start: float, end: float) -> None:
        """Draw how the input becomes two streams, or these become one again."""
        middle = (start + end) / 2
        for stream, name in zip(self.streams, ("x₁", "x₂"), strict=False):
            self.diagram.line((self.centre, start), (self.centre, middle), (stream, middle), (stream, end))
            self.diagram.text(stream, middle + 0.1, name if end < start else "", 9)

    def _layers(self, kind: LayerKind) -> None:
        """Draw the layers of one structure in a frame, with their number or numbers."""
        bottom = self.y
        if not self.streams:
            self.diagram.line((self.centre, bottom - 0.8 * _GAP), (self.centre, bottom))
        for number, block in enumerate(kind.blocks):
            self._sublayer(block, number % 2)
        top = self.y = self.y + 0.1
        self.diagram.rectangle(self.x - self.wide, bottom, _WIDTH + 2 * self.wide, top - bottom, "#f3f5f7", MUTED, 0)
        for stream in self.streams:
            self.diagram.line((stream, bottom - 0.4 * _GAP), (stream, top))
        place = self.x + _WIDTH + self.wide + 0.12 if self.is_last else self.x - self.wide - 0.12
        label, size = f"{len(kind.layers)} x", 15
        if len(self.stack.kinds) > 1:
            lines = textwrap.wrap(runs(kind.layers), 14)
            lines = [label, "layers", *(lines if len(lines) <= 8 else [*lines[:7], "…"])]
            label, size = "\n".join(lines) if len(kind.layers) > 1 else f"layer {kind.layers[0]}", 9
        self.diagram.text(place, (bottom + top) / 2, label, size, ha="left" if self.is_last else "right")

    def _sublayer(self, block: Block, side: int) -> None:
        """Draw f with its norm and what it is added to. side: of two streams, which one is changed."""
        branch, ends = self.y + 0.75 * _GAP, (self.x, self.x + _WIDTH)
        if self.streams:
            self.y += 1.3 * _GAP
            middle = self._box("Norm")
            self.diagram.arrow((self.streams[1 - side], middle), (ends[1 - side], middle))
        elif block.wiring == "pre":
            self._up(1.3 * _GAP)
            self._box("Norm")
        read, apart = self.y + 1.25 * _GAP, _WIDTH / 4
        self._up(2 * _GAP)
        if block.is_cross:  # keys and values from the encoder
            for place in (self.centre - apart, self.centre - apart / 2):
                self.diagram.arrow((self.x - self.wide, read), (place, read), (place, self.y))
        elif "attention" in block.name.lower():  # keys and values beside the queries
            for place in (self.centre - apart, self.centre + apart):
                self.diagram.arrow((self.centre, read), (place, read), (place, self.y))
        middle = self._box(block.name, block.lines)
        if block.is_cross:
            self.crosses.append(read)
        elif "attention" in block.name.lower():
            self.reads.append(middle)
        outer = 1 if self.is_last else -1
        if self.streams:
            self.diagram.arrow((ends[side], middle), (self.streams[side] + (0.09, -0.09)[side], middle))
            self.diagram.add(self.streams[side], middle)
            return
        if block.wiring == "pre":
            self.diagram.line((self.centre, self.y), (self.centre, self.y + _GAP))
            end, to = self.y + _GAP, self.centre + outer * 0.09
            self.diagram.add(self.centre, end)
            self.y = end + 0.09
        else:
            self._up(0.7 * _GAP)
            end, to = self._box("Add, norm"), ends[self.is_last]
        outside = ends[self.is_last] + outer * _MARGIN / 2
        self.diagram.arrow((self.centre, branch), (outside, branch), (outside, end), (to, end))


def architecture_figure(model: ModelBlocks, name: str) -> Figure:
    """Draw the blocks of a model from its input, at the bottom, to its output.

    Args: name: of the model, for the title. Raises: MissingExtraError: no matplotlib.
    """
    diagram, x = Diagram(), 0.0
    drawings: list[_StackDrawing] = []
    for stack in model.stacks:
        drawings.append(_StackDrawing(diagram, stack, x, is_last=stack is model.stacks[-1]))
        x += _WIDTH + 2 * drawings[-1].wide + _BETWEEN
    *before, last = drawings
    for encoder in before:
        middle, top = last.x - last.wide - _BETWEEN / 2, encoder.y + _GAP
        diagram.line((encoder.centre, encoder.y), (encoder.centre, top), (middle, top))
        for height in last.crosses:
            diagram.line((middle, top), (middle, height), (last.x - last.wide, height))
    side, y = last.x - last.wide - _SIDE - 0.4, last.reads[0] if last.reads else 0.0
    for block in last.stack.sides if last.reads else ():
        diagram.arrow((side + _SIDE, y + 0.1), (last.x, last.reads[0] + (y - last.reads[0]) / 9), color=MUTED)
        y += diagram.box(side, y, _SIDE, block.name, block.lines) + 0.15
    for block in model.output:
        last.plain(block)
    diagram.arrow((last.centre, last.y), (last.centre, last.y + _GAP))
    diagram.text(last.centre, last.y + _GAP + 0.12, model.result, 9)
    notes = []
    if any(len(kind.layers) > 1 for stack in model.stacks if len(stack.kinds) > 1 for kind in stack.kinds):
        notes.append("Layers of one structure are drawn once; they run in the order of their numbers.")
    kinds = [kind.blocks for stack in model.stacks for kind in stack.kinds]
    if any(blocks[0].wiring == "reversible" and len(blocks) % 2 for blocks in kinds):
        notes.append("With three sublayers, the streams change places in every second layer.")
    return diagram.finish(f"{model.architecture}: {name}", model.title, notes)


def operations_figure(operations: Sequence[AttentionOperations], name: str) -> Figure:
    """Draw one column for each kind of attention: the projections, the operations inside the heads, and what follows.

    Args: name: of the model, for the title.

    Raises: ShapeError: the model has no attention. MissingExtraError: no matplotlib.
    """
    if not operations:
        raise ShapeError("the model has no attention to draw: all of its heads are pruned.")
    diagram, x, notes = Diagram(), 0.0, ["Shapes are heads x length x width, without the batch; n: queries; m: keys."]
    for one in operations:
        more = f", and {len(one.places) - 1} more of this kind" if len(one.places) > 1 else ""
        sizes = "; some have other sizes" if one.has_other_sizes else ""
        notes.append(f"{one.kind}: sizes of {one.places[0]}{more}{sizes}.")
        x += _operations(diagram, one, x)
    return diagram.finish(f"Attention of {name}", notes=notes)


def _operations(diagram: Diagram, one: AttentionOperations, x: float) -> float:
    """Draw a kind of attention, from the input of its projections to its output. Returns: the width that it takes."""
    *_, (_, _, values) = one.inputs
    apart = max(1.35, 2.7 / (len(one.inputs) - 1))
    reach, width = apart * (len(one.inputs) - 1) - 0.2, apart * (len(one.inputs) - 1) + 1.15
    reads = max(number for number, (step, _) in enumerate(one.steps) if step == "MatMul")
    inputs = [x + apart * place + 0.575 for place in range(len(one.inputs))]
    start = y = 4.9 * _GAP
    for column, (letter, source, shape) in zip(inputs, one.inputs, strict=True):
        for number, line in enumerate(textwrap.wrap(source, 14)):
            diagram.text(column, -0.1 - _LINE * number, line)
        diagram.arrow((column, 0.0), (column, _GAP))
        top = _GAP + diagram.box(column - 0.575, _GAP, 1.15, "Linear", copies=one.num_heads)
        diagram.arrow((column, top), (column, start))
        diagram.text(column + 0.07, start - 0.2, letter, 9, weight="bold", ha="left")
        diagram.text(column + 0.07, start - 0.38, shape, 7.5, **_NOTE)
    for number, (step, formula) in enumerate(one.steps):
        height = diagram.box(x, y, reach, step, (formula,))
        if number == reads:
            diagram.arrow((inputs[-1], start), (inputs[-1], y + height / 2), (x + reach, y + height / 2))
        y += height + _GAP
        diagram.arrow((x + reach / 2, y - _GAP), (x + reach / 2, y))
    diagram.rectangle(x - 0.1, start - 0.1, width + 0.2, y - start - _GAP + 0.2, "#f3f5f7", MUTED, 0)
    diagram.text(x + width, y - _GAP - 0.05, f"{one.num_heads} heads", 9, ha="right")
    merged = f"n x {one.num_heads * int(values.rpartition(' ')[2])}"
    for step, shape in (("Concat", merged), ("Linear", f"n x {one.d_model}")):
        y += _GAP + diagram.box(x, y, reach, step, (shape,))
        diagram.arrow((x + reach / 2, y - _GAP), (x + reach / 2, y))
    is_plain = one.kind == "Multi-head attention" and [step for step, _ in one.steps[:2]] == ["MatMul", "Scale"]
    for line in reversed(textwrap.wrap("Scaled dot-product attention" if is_plain else one.kind, int(width * 9))):
        y += 0.2
        diagram.text(x, y, line, 11, weight="bold", ha="left")
    return width + 0.6
