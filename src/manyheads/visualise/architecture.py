"""The blocks of a model as a diagram, in the manner of figure 1 of "Attention is all you need"."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from manyheads.visualise.drawing import LINE, Sheet, box_height
from manyheads.visualise.figure import MUTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.architectures.blocks import Block, LayerKind, ModelBlocks, Stack

__all__ = ["COLOURS_OF_BLOCKS", "architecture_figure"]

COLOURS_OF_BLOCKS = {
    "embedding": "#fbd9e0",
    "positions": "#e3e6ea",
    "attention": "#ffdfb8",
    "feed-forward": "#c5e6f2",
    "norm": "#f3f0b6",
    "pooling": "#dcd3ee",
    "head": "#cfe8cf",
    "memory": "#dcd3ee",
}
_OTHER = "#e3e6ea"
_WIDTH = 2.75
"""Of a box of a stack, in inches."""
_GAP = 0.26
_MARGIN = 0.34
"""From a frame to its boxes: the space of a residual connection."""
_STREAM = 0.5
"""From a stream of a reversible layer to the boxes between both."""
_SIDE = 1.75
"""Width of the boxes beside a stack."""
_BETWEEN = 1.0
_LABEL = 1.15


class _StackDrawing:
    """Draws one stack from below. x: of the left side of its boxes; outer: 1 if residuals and labels are on the right,
    -1 on the left. crosses: the heights at which the encoder's output is read.
    """

    def __init__(self, sheet: Sheet, stack: Stack, x: float, outer: int) -> None:
        self.sheet, self.stack, self.x, self.outer = sheet, stack, x, outer
        self.centre = x + _WIDTH / 2
        self.crosses: list[float] = []
        self.reads: list[tuple[float, float]] = []  # bottom and height of self-attention boxes
        self.y = 0.0

    def draw(self) -> None:
        """Draw all of it; `y` is then the top."""
        self.sheet.text(self.centre, self.y, self.stack.reads, size=9)
        self.y += 0.12
        for block in self.stack.before:
            self._plain(block)
        if self.stack.kinds and any(kind.blocks[0].wiring == "reversible" for kind in self.stack.kinds):
            self._split()
        for kind in self.stack.kinds:
            self._layers(kind)
        if self.stack.kinds and self._is_reversible(self.stack.kinds[-1]):
            self._join()
        for block in self.stack.after:
            self._plain(block)

    def _plain(self, block: Block) -> None:
        """Draw a block on the way up, with the shape of what it returns."""
        self.sheet.arrow((self.centre, self.y), (self.centre, self.y + _GAP))
        self.y += _GAP
        self.y += self._box(block)
        if block.shape:
            self.sheet.note(self.centre + 0.08, self.y + _GAP / 2 - 0.02, block.shape)

    def _box(self, block: Block, *, indent: float = 0.0) -> float:
        colour = COLOURS_OF_BLOCKS.get(block.kind, _OTHER)
        return self.sheet.box(self.x + indent, self.y, _WIDTH - 2 * indent, block.name, block.lines, colour=colour)

    @staticmethod
    def _is_reversible(kind: LayerKind) -> bool:
        return kind.blocks[0].wiring == "reversible"

    def _layers(self, kind: LayerKind) -> None:
        """Draw the layers of one structure in a frame."""
        bottom = self.y + _GAP
        if not self._is_reversible(kind):  # so that a residual connection begins inside the frame
            self.sheet.line((self.centre, self.y), (self.centre, self.y + 0.6 * _GAP))
            self.y += 0.6 * _GAP
        if self._is_reversible(kind):
            for number, block in enumerate(kind.blocks):
                self._reversible(block, number)
            self._streams(self.y, self.y + _GAP)
        else:
            for block in kind.blocks:
                self._pre(block) if block.wiring == "pre" else self._post(block)
        top = self.y + 0.1
        wide = _STREAM + 0.2 if self._is_reversible(kind) else _MARGIN
        below = 0.08 if self._is_reversible(kind) else 0.02
        self.sheet.frame(self.x - wide, bottom - below, _WIDTH + 2 * wide, top - bottom + below)
        label = _layers_label(kind.layers, self.stack.num_layers)
        place = self.x + _WIDTH + wide + 0.12 if self.outer > 0 else self.x - wide - 0.12
        big = len(label) == 1
        self.sheet.text(
            place,
            (bottom + top) / 2,
            "\n".join(label).strip(),
            size=15 if big else 9,
            ha="left" if self.outer > 0 else "right",
        )
        self.y += 0.1

    def _enter(self, block: Block) -> float:
        """Draw the arrows into a sublayer from below: three of self-attention, as queries, keys and values."""
        start, end = self.y, self.y + 2 * _GAP
        if block.kind != "attention":
            self.sheet.arrow((self.centre, start), (self.centre, end))
            return end
        middle = start + 1.25 * _GAP
        apart = _WIDTH / 4
        if block.is_cross:
            self.sheet.arrow((self.centre, start), (self.centre, end))
            self.crosses.append(middle)
            inner = self.x - _MARGIN
            for place in (self.centre - apart, self.centre - apart / 2):
                self.sheet.arrow((inner, middle), (place, middle), (place, end))
            return end
        self.sheet.arrow((self.centre, start), (self.centre, end))
        for place in (self.centre - apart, self.centre + apart):
            self.sheet.arrow((self.centre, middle), (place, middle), (place, end))
        self.reads.append((end, box_height(block.name, block.lines, _WIDTH)))
        return end

    def _outside(self) -> float:
        return self.x + _WIDTH + _MARGIN / 2 if self.outer > 0 else self.x - _MARGIN / 2

    def _post(self, block: Block) -> None:
        """Draw LN(x + f(x))."""
        branch = self.y + 0.75 * _GAP
        self.y = self._enter(block)
        self.y += self._box(block)
        self.sheet.arrow((self.centre, self.y), (self.centre, self.y + 0.7 * _GAP))
        self.y += 0.7 * _GAP
        height = self.sheet.box(self.x, self.y, _WIDTH, "Add, norm", colour=COLOURS_OF_BLOCKS["norm"])
        self._bypass(branch, self.y + height / 2, self.x + _WIDTH if self.outer > 0 else self.x)
        self.y += height

    def _pre(self, block: Block) -> None:
        """Draw x + f(LN(x))."""
        branch = self.y + 0.75 * _GAP
        self.sheet.arrow((self.centre, self.y), (self.centre, self.y + 1.3 * _GAP))
        self.y += 1.3 * _GAP
        self.y += self.sheet.box(self.x, self.y, _WIDTH, "Norm", colour=COLOURS_OF_BLOCKS["norm"])
        self.y = self._enter(block)
        self.y += self._box(block)
        self.sheet.line((self.centre, self.y), (self.centre, self.y + 0.27))
        self.y += 0.27
        self._bypass(branch, self.y, self.centre + 0.09 * self.outer)
        self.sheet.circle(self.centre, self.y)
        self.y += 0.09

    def _bypass(self, start: float, end: float, to: float) -> None:
        outside = self._outside()
        self.sheet.arrow((self.centre, start), (outside, start), (outside, end), (to, end))

    def _streams(self, start: float, end: float) -> None:
        for place in self._stream_places():
            self.sheet.line((place, start), (place, end))

    def _stream_places(self) -> tuple[float, float]:
        return self.x - _STREAM / 2, self.x + _WIDTH + _STREAM / 2

    def _split(self) -> None:
        """Draw how the input becomes both streams."""
        left, right = self._stream_places()
        fork = self.y + _GAP
        self.sheet.line((self.centre, self.y), (self.centre, fork))
        for place, name in ((left, "x₁"), (right, "x₂")):
            self.sheet.line((self.centre, fork), (place, fork), (place, fork + 1.2 * _GAP))
            inwards = 0.1 if place == left else -0.1
            self.sheet.text(place + inwards, fork + 0.4 * _GAP, name, size=9, ha="left" if inwards > 0 else "right")
        self.y = fork + 0.2 * _GAP

    def _reversible(self, block: Block, number: int) -> None:
        """Draw how one stream gets f(LN(the other)); the first sublayer changes the left one, the next the right."""
        left, right = self._stream_places()
        read, changed = (right, left) if number % 2 == 0 else (left, right)
        near, far = (self.x + _WIDTH, self.x) if number % 2 == 0 else (self.x, self.x + _WIDTH)
        start = self.y
        self.y += 1.6 * _GAP
        norm = self.y
        height = self.sheet.box(self.x, self.y, _WIDTH, "Norm", colour=COLOURS_OF_BLOCKS["norm"])
        self.sheet.arrow((read, norm + height / 2), (near, norm + height / 2))
        self.y += height
        if block.is_cross:
            self.sheet.arrow((self.centre, self.y), (self.centre, self.y + 1.1 * _GAP))
            middle = self.y + 0.55 * _GAP
            self.crosses.append(middle)
            for place in (self.centre - _WIDTH / 4, self.centre - _WIDTH / 8):
                self.sheet.arrow((self.x - _STREAM - 0.2, middle), (place, middle), (place, self.y + 1.1 * _GAP))
            self.y += 1.1 * _GAP
        else:
            self.sheet.arrow((self.centre, self.y), (self.centre, self.y + 0.8 * _GAP))
            self.y += 0.8 * _GAP
        if block.kind == "attention" and not block.is_cross:
            self.reads.append((self.y, box_height(block.name, block.lines, _WIDTH)))
        height = self._box(block)
        middle = self.y + height / 2
        self.sheet.arrow((far, middle), (changed + (0.09 if changed < far else -0.09), middle))
        self.sheet.circle(changed, middle)
        self.y += height
        self._streams(start, self.y)

    def _join(self) -> None:
        """Draw how both streams become one input again."""
        left, right = self._stream_places()
        top = self.y + 0.9 * _GAP
        for place in (left, right):
            self.sheet.line((place, self.y - 0.1), (place, top), (self.centre, top))
        self.y = top


def architecture_figure(model: ModelBlocks, name: str) -> Figure:
    """Draw the blocks of a model from its input, at the bottom, to its output.

    Args: name: of the model, for the title.

    Raises: MissingExtraError: no matplotlib.
    """
    sheet = Sheet()
    drawings: list[_StackDrawing] = []
    wide = _STREAM + 0.2 if _any_reversible(model) else _MARGIN
    x = 0.0
    for place, stack in enumerate(model.stacks):
        outer = -1 if place < len(model.stacks) - 1 else 1
        drawing = _StackDrawing(sheet, stack, x, outer)
        drawing.draw()
        drawings.append(drawing)
        x += _WIDTH + 2 * wide + _BETWEEN
    *before, last = drawings
    for drawing in before:
        _encoder_output(sheet, drawing, last, wide)
    _sides(sheet, last, wide)
    for block in model.output:
        last._plain(block)
    sheet.arrow((last.centre, last.y), (last.centre, last.y + _GAP))
    sheet.text(last.centre, last.y + _GAP + 0.12, model.result, size=9)
    for drawing in drawings:
        if drawing.stack.name:
            sheet.text(drawing.centre, -0.27, drawing.stack.name, size=11, weight="bold")
    left = -wide - (_LABEL if before else 0.2)
    left = min(left, -wide - _SIDE - 0.65) if last.stack.sides else left
    right = last.x + _WIDTH + wide + _LABEL
    top = max(drawing.y for drawing in drawings) + 0.65
    return _titled(sheet, model, name, (left, -0.45 if model.stacks[0].name else -0.22, right, top))


def _titled(sheet: Sheet, model: ModelBlocks, name: str, extent: tuple[float, float, float, float]) -> Figure:
    left, bottom, right, top = extent
    lines = textwrap.wrap(model.title, max(24, int((right - left - 0.3) * 13.5)))
    for number, line in enumerate(lines):
        sheet.note(left + 0.15, top + LINE * (len(lines) - number - 1) * 1.1 + 0.05, line, size=8.5)
    top += 0.05 + LINE * 1.1 * len(lines)
    heading = textwrap.shorten(f"{model.architecture}: {name}", max(20, int((right - left) * 8.5)), placeholder="…")
    sheet.text(left + 0.15, top + 0.12, heading, size=12, weight="bold", ha="left")
    notes = _notes(model)
    wrapped = [part for note in notes for part in textwrap.wrap(note, max(24, int((right - left - 0.3) * 14.5)))]
    for number, line in enumerate(wrapped):
        sheet.note(left + 0.15, bottom - LINE * number, line)
    return sheet.figure(left, bottom - LINE * len(wrapped), right, top + 0.32)


def _notes(model: ModelBlocks) -> list[str]:
    notes = []
    kinds = [kind for stack in model.stacks for kind in stack.kinds]
    if any(len(stack.kinds) > 1 and stack.num_layers > len(stack.kinds) for stack in model.stacks):
        notes.append("Layers of one structure are drawn once; they run in the order of their numbers.")
    if any(kind.blocks[0].wiring == "reversible" and len(kind.blocks) % 2 for kind in kinds):
        notes.append("With three sublayers, x₁ and x₂ change places in every second layer.")
    return notes


def _any_reversible(model: ModelBlocks) -> bool:
    return any(block.wiring == "reversible" for stack in model.stacks for kind in stack.kinds for block in kind.blocks)


def _encoder_output(sheet: Sheet, encoder: _StackDrawing, decoder: _StackDrawing, wide: float) -> None:
    """Draw the way from the top of the encoder to the attention that reads it."""
    middle = encoder.x + _WIDTH + wide + _BETWEEN / 2
    top = encoder.y + _GAP
    if not decoder.crosses:
        return
    sheet.line((encoder.centre, encoder.y), (encoder.centre, top), (middle, top))
    low, high = min([*decoder.crosses, top]), max([*decoder.crosses, top])
    sheet.line((middle, low), (middle, high))
    for height in decoder.crosses:
        sheet.line((middle, height), (decoder.x - wide, height))


def _sides(sheet: Sheet, drawing: _StackDrawing, wide: float) -> None:
    """Draw memory and distances to the left of the attention that reads them."""
    if not (drawing.stack.sides and drawing.reads):
        return
    bottom, height = drawing.reads[0]
    x = drawing.x - wide - _SIDE - 0.5
    heights = [box_height(block.name, block.lines, _SIDE) for block in drawing.stack.sides]
    y = bottom + height / 2 - (sum(heights) + 0.15 * (len(heights) - 1)) / 2
    for place, (block, own) in enumerate(zip(drawing.stack.sides, heights, strict=True)):
        colour = COLOURS_OF_BLOCKS.get(block.kind, _OTHER)
        sheet.box(x, y, _SIDE, block.name, block.lines, colour=colour)
        into = bottom + height * (place + 1) / (len(heights) + 1)
        bend = x + _SIDE + 0.2 + 0.1 * place
        sheet.arrow((x + _SIDE, y + own / 2), (bend, y + own / 2), (bend, into), (drawing.x, into), colour=MUTED)
        y += own + 0.15


def _layers_label(numbers: Sequence[int], num_layers: int) -> list[str]:
    """Return which layers a frame stands for: `6 x`, or their numbers in short lines."""
    if len(numbers) == num_layers:
        return [f"{num_layers} x"]
    steps = {after - before for before, after in zip(numbers, numbers[1:], strict=False)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        told = f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    else:
        runs: list[list[int]] = []
        for number in numbers:
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        told = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    lines = textwrap.wrap(told, 14)
    if len(lines) > 8:
        lines = [*lines[:7], "…"]
    return [f"layer {numbers[0]}", ""] if len(numbers) == 1 else [f"{len(numbers)} x", "layers", *lines]
