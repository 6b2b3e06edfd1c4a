"""`manyheads inspect shapes MODEL --text TEXT`: every tensor from input to output."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from manyheads.cli.command_line.parsing import command
from manyheads.cli.machine import set_up_machine
from manyheads.cli.streams import say_or_json
from manyheads.config.options import CommandPage, Shared, option
from manyheads.extras.inspect.options import ModelOptions


@dataclass(frozen=True, kw_only=True)
class ShapesOptions(ModelOptions):
    """Options of `manyheads inspect shapes`."""

    target: str | None = option(
        "The translation; without it, the model's own.", default=None, metavar="TEXT", default_is="the model's own"
    )
    every_layer: bool = option("Print all layers, also those that repeat an earlier layer.", default=False)
    json: bool = Shared.json("Print a JSON array of objects with module, name, shape and equation.")


PAGE = CommandPage(
    ShapesOptions,
    """Print every tensor that a model computes for a text, from input to output: the module, the name, the shape and
the equation. A layer that repeats an earlier one of its stack is summarised in one line.""",
    (
        'manyheads inspect shapes runs/demo --text "I am hungry."',
        'manyheads inspect shapes runs/xl-demo --text "He opened the door." --every-layer',
    ),
)


@command(PAGE, "inspect shapes")
def run(options: ShapesOptions) -> int:
    """Print the table. Returns: the exit code."""
    set_up_machine()
    from manyheads.extras.inspect.attending import shapes_of
    from manyheads.extras.inspect.tracing import folded, table

    model = options.open()
    lines = shapes_of(model, options.text, options.target)
    if not options.every_layer:
        lines = folded(lines)
    say_or_json([asdict(line) for line in lines], "\n".join(table(lines)), as_json=options.json)
    return 0
