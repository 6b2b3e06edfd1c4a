"""`manyheads inspect architecture MODEL`: the blocks of a model, and the operations of its attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import set_up_machine
from manyheads.config.options import CommandPage, Shared, option
from manyheads.extras.inspect.options import PICTURES, check_kinds, picture_option, write_figure
from manyheads.files.verify import json_text


@dataclass(frozen=True, kw_only=True)
class ArchitectureOptions:
    """Options of `manyheads inspect architecture`."""

    model: str = Shared.model()
    json: bool = Shared.json("Print a JSON object with blocks and operations.")
    output: tuple[str, ...] = picture_option("architecture.png")
    operations: tuple[str, ...] = option(
        f"Files for the operations of attention: .{', .'.join(PICTURES)}.",
        default=("operations.png",),
        metavar="FILE ...",
        default_is="operations.png",
    )


PAGE = CommandPage(
    ArchitectureOptions,
    """Draw a model in the form of figures 1 and 2 of "Attention is all you need": its blocks from input to output, and
the operations of each kind of its attention. The model is run once; order, sizes, masks, norms and shared matrices are
read from this run.""",
    (
        "manyheads inspect architecture runs/demo",
        "manyheads inspect architecture runs/reformer --output blocks.svg --operations operations.svg",
        "manyheads inspect architecture runs/xl-demo --json",
    ),
)


@command(PAGE, "inspect architecture")
def run(options: ArchitectureOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    set_up_machine()
    check_kinds(options.output)
    check_kinds(options.operations, given_by="--operations")
    from manyheads.extras.inspect.blocks import blocks_of
    from manyheads.extras.inspect.drawings.architecture import architecture_figure, operations_figure
    from manyheads.models.pretrained import load

    blocks = blocks_of(load(options.model))
    figure = architecture_figure(blocks, options.model)
    operations = operations_figure(blocks.operations, options.model) if blocks.operations else None
    if options.json:
        print(json_text(asdict(blocks), indent=2))
    write_figure(figure, options.output, as_json=options.json)
    if operations is not None:
        write_figure(operations, options.operations, as_json=options.json)
    return 0
