"""One stack of a model's blocks as a column of boxes, from its input at the bottom to its output."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from manyheads.extras.inspect.drawings.drawing import Sheet, box_height

if TYPE_CHECKING:
    from manyheads.extras.inspect.blocks import Block, LayerKind, Stack

__all__ = ["COLOURS_OF_BLOCKS", "GAP", "MARGIN", "OTHER_COLOUR", "STACK_WIDTH", "STREAM", "StackDrawing"]

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
OTHER_COLOUR = "#e3e6ea"
STACK_WIDTH = 2.75
"""Of a box of a stack, in inches."""
GAP = 0.26
MARGIN = 0.34
"""From a frame to its boxes: the space of a residual connection."""
STREAM = 0.5
"""From a stream of a reversible layer to the boxes between both."""


class StackDrawing:
    """Draws one stack from below. x: of the left side of its boxes; outer: 1 if residuals and labels are on the right,
    -1 on the left. crosses: the heights at which the encoder's output is read.
    """

    def __init__(self, sheet: Sheet, stack: Stack, x: float, outer: int) -> None:
        self.sheet, self.stack, self.x, self.outer = sheet, stack, x, outer
        self.centre = x + STACK_WIDTH / 2
        self.crosses: list[float] = []
        self.reads: list[tuple[float, float]] = []  # bottom and height of self-attention boxes
        self.y = 0.0

    def draw(self) -> None:
        """Draw all of it; `y` is then the top."""
        self.sheet.text(self.centre, self.y, self.stack.reads, size=9)
        self.y += 0.12
        for block in self.stack.before:
            self.plain(block)
        if self.stack.kinds and any(kind.blocks[0].wiring == "reversible" for kind in self.stack.kinds):
            self._split()
        for kind in self.stack.kinds:
            self._layers(kind)
        if self.stack.kinds and self._is_reversible(self.stack.kinds[-1]):
            self._join()
        for block in self.stack.after:
            self.plain(block)

    def plain(self, block: Block) -> None:
        """Draw a block on the way up, with the shape of what it returns."""
        self.sheet.arrow((self.centre, self.y), (self.centre, self.y + GAP))
        self.y += GAP
        self.y += self._box(block)
        if block.shape:
            self.sheet.note(self.centre + 0.08, self.y + GAP / 2 - 0.02, block.shape)

    def _box(self, block: Block, *, indent: float = 0.0) -> float:
        colour = COLOURS_OF_BLOCKS.get(block.kind, OTHER_COLOUR)
        return self.sheet.box(self.x + indent, self.y, STACK_WIDTH - 2 * indent, block.name, block.lines, colour=colour)

    @staticmethod
    def _is_reversible(kind: LayerKind) -> bool:
        return kind.blocks[0].wiring == "reversible"

    def _layers(self, kind: LayerKind) -> None:
        """Draw the layers of one structure in a frame."""
        bottom = self.y + GAP
        if not self._is_reversible(kind):  # so that a residual connection begins inside the frame
            self.sheet.line((self.centre, self.y), (self.centre, self.y + 0.6 * GAP))
            self.y += 0.6 * GAP
        if self._is_reversible(kind):
            for number, block in enumerate(kind.blocks):
                self._reversible(block, number)
            self._streams(self.y, self.y + GAP)
        else:
            for block in kind.blocks:
                self._pre(block) if block.wiring == "pre" else self._post(block)
        top = self.y + 0.1
        wide = STREAM + 0.2 if self._is_reversible(kind) else MARGIN
        below = 0.08 if self._is_reversible(kind) else 0.02
        self.sheet.frame(self.x - wide, bottom - below, STACK_WIDTH + 2 * wide, top - bottom + below)
        label = _layers_label(kind.layers, self.stack.num_layers)
        place = self.x + STACK_WIDTH + wide + 0.12 if self.outer > 0 else self.x - wide - 0.12
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
        """Draw the arrows into a sublayer from below: three for self-attention (queries, keys and values)."""
        start, end = self.y, self.y + 2 * GAP
        if block.kind != "attention":
            self.sheet.arrow((self.centre, start), (self.centre, end))
            return end
        middle = start + 1.25 * GAP
        apart = STACK_WIDTH / 4
        if block.is_cross:
            self.sheet.arrow((self.centre, start), (self.centre, end))
            self.crosses.append(middle)
            inner = self.x - MARGIN
            for place in (self.centre - apart, self.centre - apart / 2):
                self.sheet.arrow((inner, middle), (place, middle), (place, end))
            return end
        self.sheet.arrow((self.centre, start), (self.centre, end))
        for place in (self.centre - apart, self.centre + apart):
            self.sheet.arrow((self.centre, middle), (place, middle), (place, end))
        self.reads.append((end, box_height(block.name, block.lines, STACK_WIDTH)))
        return end

    def _outside(self) -> float:
        return self.x + STACK_WIDTH + MARGIN / 2 if self.outer > 0 else self.x - MARGIN / 2

    def _post(self, block: Block) -> None:
        """Draw LN(x + f(x))."""
        branch = self.y + 0.75 * GAP
        self.y = self._enter(block)
        self.y += self._box(block)
        self.sheet.arrow((self.centre, self.y), (self.centre, self.y + 0.7 * GAP))
        self.y += 0.7 * GAP
        height = self.sheet.box(self.x, self.y, STACK_WIDTH, "Add, norm", colour=COLOURS_OF_BLOCKS["norm"])
        self._bypass(branch, self.y + height / 2, self.x + STACK_WIDTH if self.outer > 0 else self.x)
        self.y += height

    def _pre(self, block: Block) -> None:
        """Draw x + f(LN(x))."""
        branch = self.y + 0.75 * GAP
        self.sheet.arrow((self.centre, self.y), (self.centre, self.y + 1.3 * GAP))
        self.y += 1.3 * GAP
        self.y += self.sheet.box(self.x, self.y, STACK_WIDTH, "Norm", colour=COLOURS_OF_BLOCKS["norm"])
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
        return self.x - STREAM / 2, self.x + STACK_WIDTH + STREAM / 2

    def _split(self) -> None:
        """Draw how the input becomes both streams."""
        left, right = self._stream_places()
        fork = self.y + GAP
        self.sheet.line((self.centre, self.y), (self.centre, fork))
        for place, name in ((left, "x₁"), (right, "x₂")):
            self.sheet.line((self.centre, fork), (place, fork), (place, fork + 1.2 * GAP))
            inwards = 0.1 if place == left else -0.1
            self.sheet.text(place + inwards, fork + 0.4 * GAP, name, size=9, ha="left" if inwards > 0 else "right")
        self.y = fork + 0.2 * GAP

    def _reversible(self, block: Block, number: int) -> None:
        """Draw how f(LN(one stream)) is added to the other: first to the left stream, then to the right, and so on."""
        left, right = self._stream_places()
        read, changed = (right, left) if number % 2 == 0 else (left, right)
        near, far = (self.x + STACK_WIDTH, self.x) if number % 2 == 0 else (self.x, self.x + STACK_WIDTH)
        start = self.y
        self.y += 1.6 * GAP
        norm = self.y
        height = self.sheet.box(self.x, self.y, STACK_WIDTH, "Norm", colour=COLOURS_OF_BLOCKS["norm"])
        self.sheet.arrow((read, norm + height / 2), (near, norm + height / 2))
        self.y += height
        if block.is_cross:
            self.sheet.arrow((self.centre, self.y), (self.centre, self.y + 1.1 * GAP))
            middle = self.y + 0.55 * GAP
            self.crosses.append(middle)
            for place in (self.centre - STACK_WIDTH / 4, self.centre - STACK_WIDTH / 8):
                self.sheet.arrow((self.x - STREAM - 0.2, middle), (place, middle), (place, self.y + 1.1 * GAP))
            self.y += 1.1 * GAP
        else:
            self.sheet.arrow((self.centre, self.y), (self.centre, self.y + 0.8 * GAP))
            self.y += 0.8 * GAP
        if block.kind == "attention" and not block.is_cross:
            self.reads.append((self.y, box_height(block.name, block.lines, STACK_WIDTH)))
        height = self._box(block)
        middle = self.y + height / 2
        self.sheet.arrow((far, middle), (changed + (0.09 if changed < far else -0.09), middle))
        self.sheet.circle(changed, middle)
        self.y += height
        self._streams(start, self.y)

    def _join(self) -> None:
        """Draw how both streams become one input again."""
        left, right = self._stream_places()
        top = self.y + 0.9 * GAP
        for place in (left, right):
            self.sheet.line((place, self.y - 0.1), (place, top), (self.centre, top))
        self.y = top


def _layers_label(numbers: Sequence[int], num_layers: int) -> list[str]:
    """Return the label of the layers in a frame: `6 x`, or their numbers in short lines."""
    if len(numbers) == num_layers:
        return [f"{num_layers} x"]
    steps = {after - before for before, after in pairwise(numbers)}
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
