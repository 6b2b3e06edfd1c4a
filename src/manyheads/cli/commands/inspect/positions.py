"""`manyheads inspect positions`: what is added to a token for its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.commands.inspect.picture_files import check_kinds, picture_option, write_figure
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import torch

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


def run(arguments: Sequence[str]) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    options = parse(PAGE, arguments, "inspect positions")
    check_kinds(options.output)
    check(options, "--", between(1, _MOST_POSITIONS), "length")
    check(options, "--", between(1, _MOST_WIDTH), "d_model")
    if options.model is not None and (options.d_model is not None or options.layout is not None):
        raise ConfigError("--d-model and --layout come from the model; leave them out, or leave out MODEL.")
    from manyheads.visualise.positions import positions_figure

    table, title, place_name = _of_model(options.model, options.length) if options.model else _of_width(options)
    figure = positions_figure(table, features=options.features or None, title=title, place_name=place_name)
    write_figure(figure, options.output)
    return 0


def _of_width(options: PositionsOptions) -> tuple[torch.Tensor, str, str]:
    import torch

    from manyheads.nn.positions import sinusoidal_table

    width = options.d_model or 64
    table = sinusoidal_table(torch.arange(float(options.length)), width, options.layout or "interleaved")
    return table, f"Sinusoidal positions, width {width}", "position"


def _of_model(path: str, length: int) -> tuple[torch.Tensor, str, str]:
    """The first table of a model, what it is, and what a row of it is."""
    import torch

    import manyheads
    from manyheads.nn.attention.relative import DistanceEncoding
    from manyheads.nn.positions import AxialPositions, LearnedPositions, SinusoidalPositions

    for name, module in manyheads.load(path).named_modules():
        shown = name.removeprefix("body.")
        with torch.no_grad():
            if isinstance(module, SinusoidalPositions):
                return module(torch.zeros(1, length, module.d_model))[0], f"Sinusoidal positions: {shown}", "position"
            if isinstance(module, LearnedPositions):
                rows = min(length, module.max_len)
                table = module(torch.zeros(1, rows, module.weight.shape[1]))[0]
                return table, f"Trained positions: {shown}", "position"
            if isinstance(module, DistanceEncoding):
                return module(torch.arange(length), length), f"Sinusoidal distances: {shown}", "distance"
            if isinstance(module, AxialPositions):
                rows = min(length, module.max_len)
                grid = " x ".join(map(str, module.shape))
                table = module(torch.zeros(1, rows, sum(module.dims)))[0]
                return table, f"Axial positions, {grid}: {shown}", "position"
    raise RequestError(f"{path} has no table of positions to draw: it learns one vector per distance in every layer.")
