"""Plots of position encodings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from manyheads.errors import RequestError, ShapeError
from manyheads.extras.inspect.drawings.figure import COLOURS, INK, add_colour_bar, as_array, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

__all__ = ["PositionTable", "first_table", "position_tables", "positions_figure", "sinusoidal_positions"]


class PositionTable(NamedTuple):
    """A table to draw. table: (length, d_model). place_name: what a row is, "position" or "distance"."""

    table: Tensor
    title: str
    place_name: str = "position"


def sinusoidal_positions(
    length: int, d_model: int, layout: Literal["interleaved", "halves"] = "interleaved"
) -> PositionTable:
    """Return sines and cosines of this width."""
    import torch

    from manyheads.nn.positions import sinusoidal_table

    table = sinusoidal_table(torch.arange(float(length)), d_model, layout)
    return PositionTable(table, f"Sinusoidal positions, width {d_model}")


def position_tables(model: nn.Module, length: int) -> Iterator[PositionTable]:
    """Yield the tables of positions and distances in a model, with `length` rows; a trained table can have fewer."""
    import torch

    from manyheads.nn.attention.local import LocalSelfAttention
    from manyheads.nn.attention.relative import DistanceEncoding
    from manyheads.nn.attention.relative_bias import RelativeBias
    from manyheads.nn.positions import AxialPositions, LearnedPositions, SinusoidalPositions

    for path, module in model.named_modules():
        name = path.removeprefix("body.")
        with torch.no_grad():
            if isinstance(module, SinusoidalPositions):
                yield PositionTable(module(torch.zeros(1, length, module.d_model))[0], f"Sinusoidal positions: {name}")
            elif isinstance(module, LearnedPositions):
                rows = torch.zeros(1, min(length, module.max_len), module.weight.shape[1])
                yield PositionTable(module(rows)[0], f"Trained positions: {name}")
            elif isinstance(module, DistanceEncoding):
                distances = module(torch.arange(length), length)
                yield PositionTable(distances, f"Sinusoidal distances: {name}", "distance")
            elif isinstance(module, AxialPositions):
                rows = torch.zeros(1, min(length, module.max_len), sum(module.dims))
                grid = " x ".join(map(str, module.shape))
                yield PositionTable(module(rows)[0], f"Axial positions, {grid}: {name}")
            elif isinstance(module, LocalSelfAttention) and module.sloped:
                penalties = cast("Tensor", module.penalties()).T[:length]
                yield PositionTable(penalties, f"Penalty of each head (feature): {name}", "distance")
            elif isinstance(module, RelativeBias):
                before = module.numbers()[:, : module.reach + 1].flip(1).T
                yield PositionTable(
                    before[:length], f"Bias of each head (feature) for earlier tokens: {name}", "distance"
                )


def first_table(model: nn.Module, name: str, length: int) -> PositionTable:
    """Return the first of `position_tables`. Raises: RequestError: the model, of this name, has none."""
    found = next(position_tables(model, length), None)
    if found is None:
        raise RequestError(
            f"{name} has no table of positions to draw: it has no positions, or learns one vector per distance in every"
            " layer."
        )
    return found


def positions_figure(
    table: Any,
    title: str = "Position encodings",
    place_name: str = "position",
    *,
    features: Sequence[int] | None = None,
) -> Figure:
    """Draw the table as a heat map, and some of its features as curves (as in the Annotated Transformer).

    Args:
        table: (length, d_model).
        features: columns drawn as curves; default: four adjacent columns, from a sixth of the width on.
        place_name: name of the row axis.

    Raises: ShapeError: another rank, or a feature that the table does not have. MissingExtraError: no matplotlib.
    """
    array = as_array(table)
    if array.ndim != 2 or 0 in array.shape:
        raise ShapeError(f"a position table of shape {array.shape}; expected (length, d_model).")
    length, d_model = array.shape
    if features is None:
        first = d_model // 6 // 2 * 2
        features = range(first, min(first + 4, d_model))
    if any(not 0 <= feature < d_model for feature in features):
        raise ShapeError(f"features {list(features)}: the columns of the table are 0 to {d_model - 1}.")
    figure = new_figure(11.0, 6.0, title)
    above, below = figure.subplots(2, 1, height_ratios=[1.25, 1.0], sharex=True)
    limit = float(np.abs(array).max()) or 1.0
    extent = (-0.5, length - 0.5, -0.5, d_model - 0.5)
    image = above.imshow(
        array.T, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", origin="lower", extent=extent,
        interpolation="nearest",
    )  # fmt: skip
    style_axes(above, y_label="feature", grid=False)
    add_colour_bar(figure, image, above, pad=0.01, aspect=20)
    for number, feature in enumerate(features):
        below.plot(array[:, feature], color=COLOURS[number % len(COLOURS)], linewidth=1.8, label=f"feature {feature}")
    style_axes(below, x_label=place_name, y_label="value")
    above.yaxis.get_major_locator().set_params(integer=True)
    below.xaxis.get_major_locator().set_params(integer=True)
    below.legend(
        frameon=False, fontsize=9, labelcolor=INK, ncols=len(list(features)), loc="lower right", bbox_to_anchor=(1, 1)
    )
    return figure
