"""`manyheads inspect shapes MODEL --text TEXT`: every tensor from input to output."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.cli.command_line.command import command
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.config.options import CommandPage, argument, group, option
from manyheads.decoding.options import InspectionDeviceOptions

if TYPE_CHECKING:
    from manyheads.architectures.tracing import TracedTensor

__all__ = ["PAGE", "ShapesOptions", "run"]


@dataclass(frozen=True, kw_only=True)
class ShapesOptions:
    """Options of `manyheads inspect shapes`."""

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    text: str = option("What the model reads.", metavar="TEXT")
    target: str | None = option(
        "The translation that it writes.", default=None, metavar="TEXT", default_is="the model's own"
    )
    every_layer: bool = option("All layers, also those that repeat an earlier one.", default=False)
    json: bool = option("Print a JSON array of objects with module, name, shape and equation.", default=False)
    run_on: InspectionDeviceOptions = group(InspectionDeviceOptions)


PAGE = CommandPage(
    ShapesOptions,
    """Print every tensor that a model makes of a text, from input to output: where it is made, what it is,
its shape, and the equation that makes it. Layers that repeat an earlier one of their stack are told in one line.""",
    (
        'manyheads inspect shapes runs/demo --text "I am hungry."',
        'manyheads inspect shapes runs/xl-demo --text "He opened the door." --every-layer',
    ),
)


@command(PAGE, "inspect shapes")
def run(options: ShapesOptions) -> int:
    """Print the table. Returns: the exit code."""
    set_up_machine()
    from manyheads.architectures.tracing import folded
    from manyheads.decoding.attending import open_model, shapes_of

    model = open_model(options.model, options.run_on.device, options.run_on.fixed_precision())
    lines = shapes_of(model, options.text, options.target)
    if not options.every_layer:
        lines = folded(lines)
    if options.json:
        print(json.dumps([dataclasses.asdict(line) for line in lines], ensure_ascii=False, indent=2))
    else:
        say("\n".join(_table(lines)))
    return 0


def _table(lines: list[TracedTensor]) -> list[str]:
    """Columns; a module's name once for all of its tensors that follow each other."""
    rows, before = [("module", "tensor", "shape", "equation")], ""
    for line in lines:
        shape = " x ".join(map(str, line.shape))
        rows.append((line.module if line.module != before else "", line.name, shape, line.equation))
        before = line.module
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    padded = ["  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(3)), row[3]]).rstrip() for row in rows]
    return [padded[0], *padded[1:]]
