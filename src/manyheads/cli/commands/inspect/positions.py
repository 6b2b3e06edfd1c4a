"""`manyheads inspect positions`: what is added to a token for its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import manyheads
from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.inspect_options import check_kinds, picture_option, write_figure
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError

__all__ = ["PAGE", "PositionsOptions", "run"]


_MOST_POSITIONS = 20_000
_MOST_WIDTH = 4096


@dataclass(frozen=True, kw_only=True)
class PositionsOptions:
    """Options of `manyheads inspect positions`."""

    model: str | None = argument(
        "A model folder, a run folder, or owner/name on the Hugging Face hub.", default=None, metavar="MODEL"
    )
    d_model: int | None = option("Width, where no model is given.", default=None, metavar="N", default_is="64")
    layout: Literal["interleaved", "halves"] | None = option(
        "Sines and cosines in turn as in the paper, or all sines first; where no model is given.",
        default=None,
        default_is="interleaved",
    )
    length: int = option("Positions.", default=100, metavar="N")
    features: tuple[int, ...] = option(
        "Features drawn as curves.", default=(), metavar="N ...", default_is="four neighbours"
    )
    output: tuple[str, ...] = picture_option("positions.png")


PAGE = CommandPage(
    PositionsOptions,
    """Draw position encodings: the table, and some of its features as curves, as the Annotated Transformer
plots them. With MODEL: its own, trained ones too; without: sines and cosines of a width.""",
    (
        "manyheads inspect positions --d-model 20 --length 100 --features 4 5 6 7",
        "manyheads inspect positions runs/demo --length 64 --output positions.svg",
    ),
)


@command(PAGE, "inspect positions")
def run(options: PositionsOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    check_kinds(options.output)
    check(options, "--", between(1, _MOST_POSITIONS), "length")
    check(options, "--", between(1, _MOST_WIDTH), "d_model")
    if options.model is not None and (options.d_model is not None or options.layout is not None):
        raise ConfigError("--d-model and --layout come from the model; leave them out, or leave out MODEL.")
    from manyheads.visualise.positions import first_table, positions_figure, sinusoidal_positions

    if options.model is None:
        shown = sinusoidal_positions(options.length, options.d_model or 64, options.layout or "interleaved")
    else:
        shown = first_table(manyheads.load(options.model), options.model, options.length)
    write_figure(positions_figure(*shown, features=options.features or None), options.output)
    return 0
