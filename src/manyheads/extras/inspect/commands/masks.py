"""`manyheads inspect masks`: which keys each query may attend to, as a picture and as numbers."""

from __future__ import annotations

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import echo
from manyheads.config.checks import between, check, not_among
from manyheads.config.options import given_options
from manyheads.errors import ConfigError
from manyheads.extras.inspect.options import MASKS_PAGE as PAGE
from manyheads.extras.inspect.options import MasksOptions, check_kinds, write_figure
from manyheads.files.verify import json_text

__all__ = ["PAGE", "run"]

_MOST_POSITIONS = 512
_MOST_ROWS = 16
_KINDS_OF_SIZES = {
    "--lengths": ("padding", "target"),
    **dict.fromkeys(("--left", "--right"), ("window",)),
    "--memory": ("memory",),
    **dict.fromkeys(("--block", "--before", "--after"), ("blocks",)),
}
"""The size of an option matters to these kinds only."""


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
    from manyheads.extras.inspect.drawings.formulas import MASK_KINDS, MaskSizes, mask_examples

    for kind in options.kinds:
        if kind not in MASK_KINDS:
            raise ConfigError(not_among("there is no mask", kind, MASK_KINDS))
    _check_drawn(options)
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
    from manyheads.extras.inspect.drawings.formulas import mask_record, mask_text, masks_figure

    figure = masks_figure([(one.title, one.formula, one.allowed, one.num_memory) for one in examples])
    if options.json:
        print(json_text([mask_record(one) for one in examples]))
    else:
        echo("\n\n".join(mask_text(one) for one in examples))
    write_figure(figure, options.output, as_json=options.json)
    return 0


def _check_drawn(options: MasksOptions) -> None:
    """Raises: ConfigError: a size is given of kinds that are not drawn."""
    for name in given_options(options):
        kinds = _KINDS_OF_SIZES.get(name)
        if kinds and options.kinds and not {*kinds} & {*options.kinds}:
            raise ConfigError(
                f"{name} is for masks of the kind {' or '.join(kinds)}, but only {', '.join(options.kinds)} is drawn;"
                f" leave out {name}, or name that kind as well."
            )
