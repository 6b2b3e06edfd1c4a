"""The operations of attention as a diagram, in the manner of figure 2 of "Attention is all you need"."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.drawing import LINE, Sheet, box_height
from manyheads.extras.inspect.drawings.stack_drawing import COLOURS_OF_BLOCKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.extras.inspect.operations import AttentionOperations, Operation

__all__ = ["operations_figure"]

_WIDTH = 2.6
_GAP = 0.3
_INPUT = 1.15
_APART = 0.2
_VALUES = 0.75
"""From the boxes of one head to the line of its values."""
_RIGHT = 5.2
"""Where the second panel begins."""
_BETWEEN = 0.5
_COLOURS = {
    "MatMul": "#dcd3ee",
    "MatMul, shift, add": "#dcd3ee",
    "Add distances": "#dcd3ee",
    "Softmax": "#cfe8cf",
    "Mask": "#fbd9e0",
    "Scale": "#f3f0b6",
    "Concat": "#f3f0b6",
    "Linear": "#e3e6ea",
}
_OTHER = "#c5e6f2"


def operations_figure(operations: Sequence[AttentionOperations], name: str) -> Figure:
    """Draw one row for each kind of attention: the operations inside the heads, and the projections before and after.

    Args: name: of the model, for the title.

    Raises: ShapeError: the model has no attention. MissingExtraError: no matplotlib.
    """
    if not operations:
        raise ShapeError("the model has no attention to draw: all of its heads are pruned.")
    sheet = Sheet()
    bottom, right = 0.0, 0.0
    for one in reversed(operations):
        notes = _notes(one, 100)
        y = bottom + LINE * len(notes) + 0.1
        for number, line in enumerate(notes):
            sheet.note(-0.1, y - 0.1 - LINE * (number + 0.5), line)
        top = max(_within(sheet, one, y), _around(sheet, one, y))
        sheet.text(-0.1, top + 0.2, _title(one), size=11, weight="bold", ha="left")
        sheet.text(_RIGHT, top + 0.2, f"{one.kind}: {one.num_heads} heads", size=11, weight="bold", ha="left")
        bottom = top + 0.35 + _BETWEEN
        right = max(right, _RIGHT + _around_width(one))
    for line in reversed(textwrap.wrap(f"Attention of {name}", int((right + 0.2) * 9))):
        sheet.text(-0.1, bottom - 0.05, line, size=12, weight="bold", ha="left")
        bottom += 0.24
    return sheet.figure(-0.25, -0.1, max(right, 8.6) + 0.35, bottom - 0.04)


def _title(one: AttentionOperations) -> str:
    if one.inputs == ("Q", "K", "V") and [step.name for step in one.steps[:2]] == ["MatMul", "Scale"]:
        return "Scaled dot-product attention" if one.kind == "Multi-head attention" else f"{one.kind}: within the heads"
    return f"{one.kind}: within the heads"


def _notes(one: AttentionOperations, letters: int) -> list[str]:
    first, *others = one.places
    more = f", and {len(others)} more of this kind" if others else ""
    sizes = "; some have other sizes" if one.has_other_sizes else ""
    keys = "n: queries; m: keys" if "m" in "".join(step.shape for step in one.projections).split() else "n: positions"
    shapes = f"Shapes are heads x length x width, without the batch; {keys}. Sizes of {first}{more}{sizes}."
    return textwrap.wrap(shapes, letters)


def _box(sheet: Sheet, x: float, y: float, width: float, operation: Operation, copies: int = 1) -> float:
    lines = (operation.formula,) if operation.formula else ()
    colour = _COLOURS.get(operation.name, _OTHER)
    return sheet.box(x, y, width, operation.name, lines, colour=colour, copies=copies)


def _input(sheet: Sheet, x: float, y: float, letter: str, shape: str) -> None:
    sheet.text(x, y + 0.25, letter, size=11, weight="bold")
    sheet.note(x, y + 0.06, shape, ha="center", size=7.5)


def _within(sheet: Sheet, one: AttentionOperations, y: float) -> float:
    """Draw the operations from the projected inputs to the heads' results. Returns: the top."""
    *others, values = zip(one.inputs, one.projections, strict=True)
    x, centre = 0.15, 0.15 + _WIDTH / 2
    value_x = x + _WIDTH + _VALUES
    spread = _WIDTH / len(others)
    for place, (letter, projection) in enumerate(others):
        column = x + spread * (place + 0.5)
        _input(sheet, column, y, letter, projection.shape)
        sheet.arrow((column, y + 0.37), (column, y + 0.37 + _GAP))
    _input(sheet, value_x, y, values[0], values[1].shape)
    start, y = y + 0.37, y + 0.37 + _GAP
    for number, step in enumerate(one.steps):
        height = _box(sheet, x, y, _WIDTH, step)
        if number == one.value_step:
            middle = y + height / 2
            sheet.arrow((value_x, start), (value_x, middle), (x + _WIDTH, middle))
        y += height
        sheet.arrow((centre, y), (centre, y + _GAP))
        sheet.note(centre + 0.08, y + _GAP / 2, step.shape)
        y += _GAP
    return y


def _around_width(one: AttentionOperations) -> float:
    return len(one.inputs) * (_INPUT + _APART)


def _around(sheet: Sheet, one: AttentionOperations, y: float) -> float:
    """Draw the projections before and after the heads. Returns: the top."""
    width = _around_width(one) - _APART
    centre = _RIGHT + width / 2
    behind = 0.05 * (min(one.num_heads, 4) - 1)
    sources = [textwrap.wrap(projection.formula, 14) for projection in one.projections]
    lowest = y + LINE * max(map(len, sources)) + 0.05
    height = box_height("Linear", (), _INPUT)
    for place, (letter, projection, lines) in enumerate(zip(one.inputs, one.projections, sources, strict=True)):
        x = _RIGHT + place * (_INPUT + _APART)
        middle = x + _INPUT / 2
        for number, line in enumerate(reversed(lines)):
            sheet.text(middle, y + LINE * (number + 0.5), line)
        sheet.arrow((middle, lowest), (middle, lowest + _GAP))
        sheet.box(x, lowest + _GAP, _INPUT, "Linear", colour=_COLOURS["Linear"], copies=one.num_heads)
        above = lowest + _GAP + height + behind
        sheet.arrow((middle, above), (middle, above + 2 * _GAP))
        sheet.text(middle + 0.07, above + 1.35 * _GAP, letter, size=9, weight="bold", ha="left")
        sheet.note(middle + 0.07, above + 0.6 * _GAP, projection.shape, size=7.5)
    y = lowest + 3 * _GAP + height + behind
    heads = f"{one.num_heads} heads, each for itself"
    y += sheet.box(
        _RIGHT,
        y,
        width,
        _title(one).partition(":")[0],
        (heads,),
        colour=COLOURS_OF_BLOCKS["attention"],
        copies=one.num_heads,
    )
    y += behind
    shape = one.steps[-1].shape
    for operation in one.output:
        sheet.arrow((centre, y), (centre, y + _GAP))
        sheet.note(centre + 0.08, y + _GAP / 2, shape)
        y += _GAP
        y += _box(sheet, centre - 1.0, y, 2.0, operation)
        shape = operation.shape
    sheet.arrow((centre, y), (centre, y + _GAP))
    sheet.note(centre + 0.08, y + _GAP / 2, shape)
    return y + _GAP
