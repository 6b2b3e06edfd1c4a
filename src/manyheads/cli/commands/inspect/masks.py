"""`manyheads inspect masks`: which keys each query may attend to, as a picture and as numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.inspect_options import check_kinds, picture_option, write_figure
from manyheads.cli.printing import say
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, argument, option
from manyheads.config.suggest import not_among
from manyheads.errors import ConfigError

__all__ = ["PAGE", "MasksOptions", "run"]

_MOST_POSITIONS = 512
_MOST_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class MasksOptions:
    """Options of `manyheads inspect masks`."""

    kinds: tuple[str, ...] = argument(
        "Some of padding, causal, target (causal and padding), window, memory (of a Transformer-XL) and blocks (of a"
        " Reformer's local layers).",
        default=(),
        metavar="KIND ...",
        default_is="all",
    )
    length: int = option("Positions.", default=8, metavar="N")
    lengths: tuple[int, ...] = option(
        "Real tokens of each row, for padding and target.", default=(), metavar="N ...", default_is="all, and 5 of 8"
    )
    left: int = option("Keys of the window before a query.", default=2, metavar="N")
    right: int = option("Keys of the window after a query.", default=0, metavar="N", default_is="0")
    memory: int = option("Positions of the memory.", default=4, metavar="N")
    block: int = option("Positions of a block.", default=3, metavar="N")
    before: int = option("Blocks that a query sees before its own.", default=1, metavar="N")
    after: int = option(
        "Blocks that a query sees after its own; with 0, no query sees a later key.",
        default=0,
        metavar="N",
        default_is="0",
    )
    json: bool = option("Print the masks as JSON.", default=False)
    output: tuple[str, ...] = picture_option("masks.png")


PAGE = CommandPage(
    MasksOptions,
    """Draw masks, and print them as numbers: a row for each query, a column for each key; 1 = may attend.
They are computed by the classes and layers that the models use.""",
    (
        "manyheads inspect masks",
        "manyheads inspect masks padding target --length 10 --lengths 10 7 3",
        "manyheads inspect masks memory blocks --memory 6 --block 4 --json --output masks.svg",
    ),
)


@command(PAGE, "inspect masks")
def run(options: MasksOptions) -> int:
    """Draw and print. Returns: the exit code. Numbers and the paths of pictures go to standard output."""
    check_kinds(options.output)
    check(options, "--", between(1, _MOST_POSITIONS), "length", "block")
    check(options, "--", between(0, _MOST_POSITIONS), "left", "right", "memory", "before", "after")
    lengths = options.lengths or (options.length, max(1, options.length * 5 // 8))
    if len(lengths) > _MOST_ROWS or not all(0 <= real <= options.length for real in lengths):
        raise ConfigError(
            f"--lengths {' '.join(map(str, lengths))}: give at most {_MOST_ROWS} numbers from 0 to --length"
            f" {options.length}."
        )
    from manyheads.nn.attention.mask_examples import MASK_KINDS, MaskSizes, mask_examples

    for kind in options.kinds:
        if kind not in MASK_KINDS:
            raise ConfigError(not_among("there is no mask", kind, MASK_KINDS))
    sizes = MaskSizes(
        length=options.length,
        lengths=lengths,
        left=options.left,
        right=options.right,
        memory_len=options.memory,
        chunk_len=options.block,
        before=options.before,
        after=options.after,
    )
    examples = mask_examples(tuple(dict.fromkeys(options.kinds)) or MASK_KINDS, sizes)
    from manyheads.visualise.masks import mask_record, mask_text, masks_figure

    figure = masks_figure([(one.title, one.formula, one.allowed, one.num_memory) for one in examples])
    if options.json:
        say(json.dumps([mask_record(one) for one in examples]))
    else:
        say("\n\n".join(mask_text(one) for one in examples))
    write_figure(figure, options.output)
    return 0
