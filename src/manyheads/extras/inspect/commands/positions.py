"""`manyheads inspect positions`: position encodings, which are added to token embeddings."""

from __future__ import annotations

import manyheads
from manyheads.cli.command_line.parsing import command
from manyheads.extras.inspect.options import POSITIONS_PAGE as PAGE
from manyheads.extras.inspect.options import PositionsOptions, check_kinds, write_figure

__all__ = ["PAGE", "run"]


@command(PAGE, "inspect positions")
def run(options: PositionsOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    check_kinds(options.output)
    from manyheads.extras.inspect.drawings.formulas import first_table, positions_figure, sinusoidal_positions

    if options.model is None:
        shown = sinusoidal_positions(options.length, options.d_model or 64, options.layout or "interleaved")
    else:
        shown = first_table(manyheads.load(options.model), options.model, options.length)
    write_figure(positions_figure(*shown, features=options.features or None), options.output)
    return 0
