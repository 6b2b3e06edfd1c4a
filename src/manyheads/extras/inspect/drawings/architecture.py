"""The blocks of a model as a diagram, in the manner of figure 1 of "Attention is all you need"."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from manyheads.extras.inspect.drawings.drawing import LINE, Sheet, box_height
from manyheads.extras.inspect.drawings.figure import MUTED
from manyheads.extras.inspect.drawings.stack_drawing import (
    COLOURS_OF_BLOCKS,
    GAP,
    MARGIN,
    OTHER_COLOUR,
    STACK_WIDTH,
    STREAM,
    StackDrawing,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.extras.inspect.blocks import ModelBlocks

__all__ = ["architecture_figure"]

_SIDE = 1.75
"""Width of the boxes beside a stack."""
_BETWEEN = 1.0
_LABEL = 1.15
"""Space beside a frame for the number of its layers."""


def architecture_figure(model: ModelBlocks, name: str) -> Figure:
    """Draw the blocks of a model from its input, at the bottom, to its output.

    Args: name: of the model, for the title.

    Raises: MissingExtraError: no matplotlib.
    """
    sheet = Sheet()
    drawings: list[StackDrawing] = []
    wide = STREAM + 0.2 if _any_reversible(model) else MARGIN
    x = 0.0
    for place, stack in enumerate(model.stacks):
        outer = -1 if place < len(model.stacks) - 1 else 1
        drawing = StackDrawing(sheet, stack, x, outer)
        drawing.draw()
        drawings.append(drawing)
        x += STACK_WIDTH + 2 * wide + _BETWEEN
    *before, last = drawings
    for drawing in before:
        _encoder_output(sheet, drawing, last, wide)
    _sides(sheet, last, wide)
    for block in model.output:
        last.plain(block)
    sheet.arrow((last.centre, last.y), (last.centre, last.y + GAP))
    sheet.text(last.centre, last.y + GAP + 0.12, model.result, size=9)
    for drawing in drawings:
        if drawing.stack.name:
            sheet.text(drawing.centre, -0.27, drawing.stack.name, size=11, weight="bold")
    left = -wide - (_LABEL if before else 0.2)
    left = min(left, -wide - _SIDE - 0.65) if last.stack.sides else left
    right = last.x + STACK_WIDTH + wide + _LABEL
    top = max(drawing.y for drawing in drawings) + 0.65
    return _titled(sheet, model, name, (left, -0.45 if model.stacks[0].name else -0.22, right, top))


def _titled(sheet: Sheet, model: ModelBlocks, name: str, extent: tuple[float, float, float, float]) -> Figure:
    left, bottom, right, top = extent
    lines = textwrap.wrap(model.title, max(24, int((right - left - 0.3) * 13.5)))
    for number, line in enumerate(lines):
        sheet.note(left + 0.15, top + LINE * (len(lines) - number - 1) * 1.1 + 0.05, line, size=8.5)
    top += 0.05 + LINE * 1.1 * len(lines)
    heading = textwrap.wrap(f"{model.architecture}: {name}", max(20, int((right - left) * 8.5)))
    for line in reversed(heading):
        sheet.text(left + 0.15, top + 0.12, line, size=12, weight="bold", ha="left")
        top += 0.24
    notes = _notes(model)
    wrapped = [part for note in notes for part in textwrap.wrap(note, max(24, int((right - left - 0.3) * 14.5)))]
    for number, line in enumerate(wrapped):
        sheet.note(left + 0.15, bottom - LINE * number, line)
    return sheet.figure(left, bottom - LINE * len(wrapped), right, top + 0.08)


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


def _encoder_output(sheet: Sheet, encoder: StackDrawing, decoder: StackDrawing, wide: float) -> None:
    """Draw the way from the top of the encoder to the attention that reads it."""
    middle = encoder.x + STACK_WIDTH + wide + _BETWEEN / 2
    top = encoder.y + GAP
    if not decoder.crosses:
        return
    sheet.line((encoder.centre, encoder.y), (encoder.centre, top), (middle, top))
    low, high = min([*decoder.crosses, top]), max([*decoder.crosses, top])
    sheet.line((middle, low), (middle, high))
    for height in decoder.crosses:
        sheet.line((middle, height), (decoder.x - wide, height))


def _sides(sheet: Sheet, drawing: StackDrawing, wide: float) -> None:
    """Draw memory and distances to the left of the attention that reads them."""
    if not (drawing.stack.sides and drawing.reads):
        return
    bottom, height = drawing.reads[0]
    x = drawing.x - wide - _SIDE - 0.5
    heights = [box_height(block.name, block.lines, _SIDE) for block in drawing.stack.sides]
    y = bottom + height / 2 - (sum(heights) + 0.15 * (len(heights) - 1)) / 2
    for place, (block, own) in enumerate(zip(drawing.stack.sides, heights, strict=True)):
        colour = COLOURS_OF_BLOCKS.get(block.kind, OTHER_COLOUR)
        sheet.box(x, y, _SIDE, block.name, block.lines, colour=colour)
        into = bottom + height * (place + 1) / (len(heights) + 1)
        bend = x + _SIDE + 0.2 + 0.1 * place
        sheet.arrow((x + _SIDE, y + own / 2), (bend, y + own / 2), (bend, into), (drawing.x, into), colour=MUTED)
        y += own + 0.15
