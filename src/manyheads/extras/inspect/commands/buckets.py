"""`manyheads inspect buckets MODEL --text TEXT`: how a Reformer's hashing sorts a text."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import set_up_machine
from manyheads.config.options import CommandPage, option
from manyheads.extras.inspect.options import ModelOptions, check_kinds, picture_option, write_figure


@dataclass(frozen=True, kw_only=True)
class BucketsOptions(ModelOptions):
    """Options of `manyheads inspect buckets`."""

    layer: int | None = option(
        "Layer, counted from 1 among the layers that hash.",
        default=None,
        metavar="N",
        default_is="the last that hashes",
    )
    head: int = option("Head whose sorted tokens are drawn, counted from 1.", default=1, metavar="N")
    output: tuple[str, ...] = picture_option("buckets.png")


PAGE = CommandPage(
    BucketsOptions,
    """Draw the buckets of the tokens of a text in a Reformer's hashed attention, for every head and round. Also draw
the tokens of one head in the order in which they are sorted by bucket, divided into chunks if the model attends by
chunks.""",
    (
        'manyheads inspect buckets runs/reformer --text "He opened the door and went in."',
        'manyheads inspect buckets runs/reformer --text "He opened the door." --layer 2 --head 3 --output buckets.svg',
    ),
)


@command(PAGE, "inspect buckets")
def run(options: BucketsOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.extras.inspect.attending import text_buckets
    from manyheads.extras.inspect.drawings.attention import layer_buckets_figure

    model = options.open()
    found, labels = text_buckets(model, options.text)
    settings = model.model.config.lsh  # type: ignore[union-attr]
    write_figure(layer_buckets_figure(found, labels, settings, options.layer, options.head), options.output)
    return 0
