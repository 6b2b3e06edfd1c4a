"""The blocks of a model and the operations of its attention as diagrams, in the manner of figures 1 and 2 of "Attention
is all you need".
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


_COLOURS = {
    "embedding": "#fbd9e0",
    "features": "#fbd9e0",
    "mask": "#fbd9e0",
    "attention": "#ffdfb8",
    "feed-forward": "#c5e6f2",
    "norm": "#f3f0b6",
    "scale": "#f3f0b6",
    "concat": "#f3f0b6",
    "pooling": "#dcd3ee",
    "memory": "#dcd3ee",
    "matmul": "#dcd3ee",
    "distances": "#dcd3ee",
    "softmax": "#cfe8cf",
}
"""By a word of a box's name; the last word that occurs counts."""
_WIDTH, _SIDE, _STEP = 2.75, 1.75, 2.6
"""Widths in inches: of a box of a stack, of one beside it, of an operation."""
_GAP, _MARGIN, _STREAM = 0.26, 0.34, 0.7
"""Between boxes, and from a frame to its boxes: with residual connections, and with two streams."""
_LABEL, _BETWEEN, _RIGHT = 1.15, 1.0, 5.2
"""Space for the number of layers, between stacks, and where the second panel of operations begins."""


def _colour(name: str) -> str:
    return next((colour for word, colour in reversed(_COLOURS.items()) if word in name.lower()), "#e3e6ea")


class _StackDrawing:
    """Draws one stack from below. x: of its boxes; is_last: residuals and labels are on the right, otherwise on the
    left. crosses: the heights at which the encoder's output is read. reads: those of self-attention.
    """

    def __init__(self, sheet: Sheet, stack: Stack, x: float, *, is_last: bool) -> None:
        self.sheet, self.stack, self.x, self.is_last = sheet, stack, x, is_last
        self.centre, self.y = x + _WIDTH / 2, 0.12
        self.crosses: list[float] = []
        self.reads: list[float] = []
        streams = any(kind.blocks[0].wiring == "reversible" for kind in stack.kinds)
        self.wide = _STREAM if streams else _MARGIN
        self.streams = (x - _STREAM / 2.5, x + _WIDTH + _STREAM / 2.5) if streams else ()
        sheet.text(self.centre, 0.0, stack.reads, size=9)
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
        self.sheet.note(self.centre + 0.08, self.y + _GAP / 2 - 0.02, block.shape)

    def _up(self, length: float) -> None:
        self.sheet.arrow((self.centre, self.y), (self.centre, self.y + length))
        self.y += length

    def _box(self, name: str, lines: Sequence[str] = ()) -> float:
        """Returns: the height of its middle."""
        height = self.sheet.box(self.x, self.y, _WIDTH, name, lines, colour=_colour(name))
        self.y += height
        return self.y - height / 2

    def _join(self, start: float, end: float) -> None:
        """Draw how the input becomes two streams, or these become one again."""
        middle = (start + end) / 2
        for stream, name in zip(self.streams, ("x₁", "x₂"), strict=False):
            self.sheet.line((self.centre, start), (self.centre, middle), (stream, middle), (stream, end))
            if end < start:
                self.sheet.text(stream, middle + 0.1, name, size=9)

    def _layers(self, kind: LayerKind) -> None:
        """Draw the layers of one structure in a frame."""
        bottom = self.y
        if not self.streams:
            self.sheet.line((self.centre, bottom - 0.8 * _GAP), (self.centre, bottom))
        for number, block in enumerate(kind.blocks):
            self._sublayer(block, number % 2)
        top = self.y + 0.1
        self.sheet.frame(self.x - self.wide, bottom, _WIDTH + 2 * self.wide, top - bottom)
        for stream in self.streams:
            self.sheet.line((stream, bottom - 0.4 * _GAP), (stream, top))
        place = self.x + _WIDTH + self.wide + 0.12 if self.is_last else self.x - self.wide - 0.12
        align = "left" if self.is_last else "right"
        label, size = _layers_label(kind.layers, self.stack.num_layers)
        self.sheet.text(place, (bottom + top) / 2, label, size=size, ha=align)
        self.y = top

    def _sublayer(self, block: Block, side: int) -> None:
        """Draw f with its norm and what it is added to. side: of two streams, which one is changed."""
        branch = self.y + 0.75 * _GAP
        far, near = (self.x, self.x + _WIDTH) if side == 0 else (self.x + _WIDTH, self.x)
        if self.streams:
            self.y += 1.3 * _GAP
            middle = self._box("Norm")
            self.sheet.arrow((self.streams[1 - side], middle), (near, middle))
        elif block.wiring == "pre":
            self._up(1.3 * _GAP)
            self._box("Norm")
        self._inputs(block)
        middle = self._box(block.name, block.lines)
        if self.streams:
            changed = self.streams[side]
            self.sheet.arrow((far, middle), (changed + (0.09 if changed < far else -0.09), middle))
            self.sheet.circle(changed, middle)
            return
        if block.wiring == "pre":
            self.sheet.line((self.centre, self.y), (self.centre, self.y + _GAP))
            end, to = self.y + _GAP, self.centre + (0.09 if self.is_last else -0.09)
            self.sheet.circle(self.centre, end)
            self.y = end + 0.09
        else:
            self._up(0.7 * _GAP)
            end, to = self._box("Add, norm"), self.x + _WIDTH if self.is_last else self.x
        outside = self.x + _WIDTH + _MARGIN / 2 if self.is_last else self.x - _MARGIN / 2
        self.sheet.arrow((self.centre, branch), (outside, branch), (outside, end), (to, end))

    def _inputs(self, block: Block) -> None:
        """Draw the arrows into a sublayer: three into attention, for queries, keys and values."""
        middle, apart = self.y + 1.25 * _GAP, _WIDTH / 4
        self._up(2 * _GAP)
        if block.is_cross:
            self.crosses.append(middle)
            for place in (self.centre - apart, self.centre - apart / 2):
                self.sheet.arrow((self.x - self.wide, middle), (place, middle), (place, self.y))
        elif block.is_attention:
            for place in (self.centre - apart, self.centre + apart):
                self.sheet.arrow((self.centre, middle), (place, middle), (place, self.y))
            self.reads.append(self.y + box_height(block.name, block.lines, _WIDTH) / 2)


def _layers_label(numbers: Sequence[int], num_layers: int) -> tuple[str, float]:
    """Return the label of the layers in a frame, and its size: `6 x`, or their numbers in short lines."""
    if len(numbers) == num_layers:
        return f"{num_layers} x", 15
    if len(numbers) == 1:
        return f"layer {numbers[0]}", 9
    lines = textwrap.wrap(runs(numbers), 14)
    return "\n".join([f"{len(numbers)} x", "layers", *(lines if len(lines) <= 8 else [*lines[:7], "…"])]), 9


def architecture_figure(model: ModelBlocks, name: str) -> Figure:
    """Draw the blocks of a model from its input, at the bottom, to its output.

    Args: name: of the model, for the title.

    Raises: MissingExtraError: no matplotlib.
    """
    sheet, x = Sheet(), 0.0
    drawings: list[_StackDrawing] = []
    for stack in model.stacks:
        drawings.append(_StackDrawing(sheet, stack, x, is_last=stack is model.stacks[-1]))
        x += _WIDTH + 2 * drawings[-1].wide + _BETWEEN
    *before, last = drawings
    for encoder in before:
        middle, top = last.x - last.wide - _BETWEEN / 2, encoder.y + _GAP
        sheet.line((encoder.centre, encoder.y), (encoder.centre, top), (middle, top))
        for height in last.crosses:
            sheet.line((middle, top), (middle, height), (last.x - last.wide, height))
    y, left = last.reads[0] if last.reads else 0.0, -drawings[0].wide - (_LABEL if before else 0.2)
    for block in last.stack.sides if last.reads else ():
        side = last.x - last.wide - _SIDE - 0.4
        height = sheet.box(side, y, _SIDE, block.name, block.lines, colour=_colour(block.name))
        sheet.arrow((side + _SIDE, y + 0.1), (last.x, last.reads[0] + (y - last.reads[0]) / 9), colour=MUTED)
        y, left = y + height + 0.15, min(left, side - 0.2)
    for block in model.output:
        last.plain(block)
    sheet.arrow((last.centre, last.y), (last.centre, last.y + _GAP))
    sheet.text(last.centre, last.y + _GAP + 0.12, model.result, size=9)
    for drawing in drawings:
        sheet.text(drawing.centre, -0.27, drawing.stack.name, size=11, weight="bold")
    right, top = last.x + _WIDTH + last.wide + _LABEL, max(drawing.y for drawing in drawings) + 0.65
    kinds = [kind for stack in model.stacks for kind in stack.kinds]
    notes = []
    if any(len(stack.kinds) > 1 and stack.num_layers > len(stack.kinds) for stack in model.stacks):
        notes.append("Layers of one structure are drawn once; they run in the order of their numbers.")
    if any(kind.blocks[0].wiring == "reversible" and len(kind.blocks) % 2 for kind in kinds):
        notes.append("With three sublayers, the streams change places in every second layer.")
    bottom = _notes(sheet, left + 0.15, -0.45, right, notes)
    top = _heading(sheet, left + 0.15, top, right, f"{model.architecture}: {name}", model.title)
    return sheet.figure(left, bottom, right, top)


def _notes(sheet: Sheet, left: float, y: float, right: float, notes: Sequence[str]) -> float:
    """Write small text from a height downwards. Returns: its lower end."""
    for line in (part for note in notes for part in textwrap.wrap(note, max(24, int((right - left) * 14)))):
        sheet.note(left, y, line)
        y -= LINE
    return y


def _heading(sheet: Sheet, left: float, y: float, right: float, title: str, below: str = "") -> float:
    """Write a title, and small text below it, above a height. Returns: its upper end."""
    for line in reversed(textwrap.wrap(below, max(24, int((right - left) * 13)))):
        sheet.note(left, y + 0.05, line, size=8.5)
        y += LINE * 1.1
    for line in reversed(textwrap.wrap(title, max(20, int((right - left) * 8.5)))):
        sheet.text(left, y + 0.17, line, size=12, weight="bold", ha="left")
        y += 0.24
    return y + 0.13


def operations_figure(operations: Sequence[AttentionOperations], name: str) -> Figure:
    """Draw one row for each kind of attention: the operations inside the heads, and the projections before and after.

    Args: name: of the model, for the title.

    Raises: ShapeError: the model has no attention. MissingExtraError: no matplotlib.
    """
    if not operations:
        raise ShapeError("the model has no attention to draw: all of its heads are pruned.")
    sheet, y = Sheet(), 0.0
    right = max(8.6, *(_RIGHT + 1.35 * len(one.inputs) for one in operations))
    for one in reversed(operations):
        more = f", and {len(one.places) - 1} more of this kind" if len(one.places) > 1 else ""
        sizes = "; some have other sizes" if one.has_other_sizes else ""
        note = "Shapes are heads x length x width, without the batch; n: queries; m: keys."
        sheet.note(-0.1, y, f"{note} Sizes of {one.places[0]}{more}{sizes}.")
        inside = _operations(sheet, one, 0.15, y + 0.2)
        top = max(inside, _projections(sheet, one, y + 0.2))
        sheet.text(-0.1, top + 0.2, _title(one), size=11, weight="bold", ha="left")
        sheet.text(_RIGHT, top + 0.2, f"{one.kind}: {one.num_heads} heads", size=11, weight="bold", ha="left")
        y = top + 0.85
    top = _heading(sheet, -0.1, y - 0.25, right, f"Attention of {name}")
    return sheet.figure(-0.25, -0.15, right + 0.35, top)


def _title(one: AttentionOperations) -> str:
    plain = one.kind == "Multi-head attention" and [step for step, _ in one.steps[:2]] == ["MatMul", "Scale"]
    return "Scaled dot-product attention" if plain else f"{one.kind}: within the heads"


def _operations(sheet: Sheet, one: AttentionOperations, x: float, y: float) -> float:
    """Draw what a head does, from its inputs to its result. Returns: the top."""
    spread, start = _STEP / (len(one.inputs) - 1), y + 0.37
    columns = [x + spread * (place + 0.5) for place in range(len(one.inputs) - 1)] + [x + _STEP + 0.75]
    for column, (letter, _, shape) in zip(columns, one.inputs, strict=True):
        sheet.text(column, y + 0.25, letter, size=11, weight="bold")
        sheet.note(column, y + 0.06, shape, ha="center", size=7.5)
    for column in columns[:-1]:
        sheet.arrow((column, start), (column, start + _GAP))
    y = start + _GAP
    reads = max(number for number, (step, _) in enumerate(one.steps) if step == "MatMul")
    for number, (step, formula) in enumerate(one.steps):
        height = sheet.box(x, y, _STEP, step, (formula,) if formula else (), colour=_colour(step))
        if number == reads:
            sheet.arrow((columns[-1], start), (columns[-1], y + height / 2), (x + _STEP, y + height / 2))
        y += height
        sheet.arrow((x + _STEP / 2, y), (x + _STEP / 2, y + _GAP))
        y += _GAP
    return y


def _projections(sheet: Sheet, one: AttentionOperations, y: float) -> float:
    """Draw the projections before and after the heads. Returns: the top."""
    width, behind = 1.35 * len(one.inputs) - 0.2, 0.05 * (min(one.num_heads, 4) - 1)
    centre, height, low = _RIGHT + width / 2, box_height("Linear", (), 1.15), y + 2 * LINE + 0.1
    for place, (letter, source, shape) in enumerate(one.inputs):
        x = _RIGHT + 1.35 * place
        for number, line in enumerate(textwrap.wrap(source, 14)):
            sheet.text(x + 0.575, low - 0.1 - LINE * number, line)
        sheet.arrow((x + 0.575, low), (x + 0.575, low + _GAP))
        sheet.box(x, low + _GAP, 1.15, "Linear", colour=_colour("Linear"), copies=one.num_heads)
        above = low + _GAP + height + behind
        sheet.arrow((x + 0.575, above), (x + 0.575, above + 2 * _GAP))
        sheet.text(x + 0.645, above + 1.35 * _GAP, letter, size=9, weight="bold", ha="left")
        sheet.note(x + 0.645, above + 0.6 * _GAP, shape, size=7.5)
    y = low + 3 * _GAP + height + behind
    heads = (f"{one.num_heads} heads, each for itself",)
    title = _title(one).partition(":")[0]
    y += sheet.box(_RIGHT, y, width, title, heads, colour=_colour("attention"), copies=one.num_heads) + behind
    value_dim = int(one.inputs[-1][2].rpartition(" ")[2])
    for step, shape in (("Concat", f"n x {one.num_heads * value_dim}"), ("Linear", f"n x {one.d_model}")):
        sheet.arrow((centre, y), (centre, y + _GAP))
        y += _GAP + sheet.box(centre - 1.0, y + _GAP, 2.0, step, (shape,), colour=_colour(step))
    sheet.arrow((centre, y), (centre, y + _GAP))
    return y + _GAP
