"""Dive into Deep Learning: what its chapters call beside modules and data, such as timers, sums, curves and heat maps.

See `d2l`. Differs: curves are drawn on request, `draw()`, not during training.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.errors import ShapeError
from manyheads.extras.texts.common import also, check_at_least, check_axes
from manyheads.nn.shapes import no_tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cpu() -> torch.device:
    """Return the CPU."""
    return torch.device("cpu")


def gpu(i: int = 0) -> torch.device:
    """Return GPU i, also where there is none."""
    return torch.device(f"cuda:{i}")


def num_gpus() -> int:
    """Return the number of GPUs."""
    return torch.cuda.device_count()


def try_gpu(i: int = 0) -> torch.device:
    """Return GPU i if there is one, otherwise the CPU."""
    return torch.device(f"cuda:{i}" if torch.cuda.device_count() > i else "cpu")


def try_all_gpus() -> list[torch.device]:
    """Return all GPUs, or the CPU if there is none."""
    return [torch.device(f"cuda:{i}") for i in range(torch.cuda.device_count())] or [torch.device("cpu")]


class Timer:
    """Measures times in seconds, from its creation or `start` to `stop`."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.start()

    def start(self) -> None:
        """Begin a measurement."""
        self.tik = time.perf_counter()

    def stop(self) -> float:
        """End a measurement, and return its seconds."""
        self.times.append(time.perf_counter() - self.tik)
        return self.times[-1]

    def avg(self) -> float:
        """Return the mean of all measurements."""
        return self.sum() / len(self.times)

    def sum(self) -> float:
        """Return the sum of all measurements."""
        return sum(self.times)

    def cumsum(self) -> list[float]:
        """Return the sums of the first measurements: of one, of two, and so on."""
        return [sum(self.times[: end + 1]) for end in range(len(self.times))]


class Accumulator:
    """n sums that grow together."""

    def __init__(self, n: int) -> None:
        self.data = [0.0] * n

    def add(self, *args: float | Tensor) -> None:
        """Add a number to each sum."""
        if len(args) != len(self.data):
            raise also(ShapeError, IndexError)(
                f"there are {len(self.data)} sums, but {len(args)} numbers; give one for each sum."
            )
        self.data = [a + float(b) for a, b in zip(self.data, args, strict=True)]

    def reset(self) -> None:
        """Set all sums to 0."""
        self.data = [0.0] * len(self.data)

    def __getitem__(self, idx: int) -> float:
        return self.data[idx]


class Animator:
    """Curves over a number of steps, drawn in the first of nrows x ncols panels.

    Args: as of `plot`. Attributes: X, Y: for each curve, its places and its values.
    """

    def __init__(
        self,
        xlabel: str | None = None,
        ylabel: str | None = None,
        legend: Sequence[str] | None = None,
        xlim: Sequence[float] | None = None,
        ylim: Sequence[float] | None = None,
        xscale: str = "linear",
        yscale: str = "linear",
        fmts: Sequence[str] = (),
        nrows: int = 1,
        ncols: int = 1,
        figsize: tuple[float, float] = (3.5, 2.5),
    ) -> None:
        check_at_least(1, nrows=nrows, ncols=ncols)
        self.xlabel, self.ylabel, self.legend, self.xlim, self.ylim = xlabel, ylabel, legend, xlim, ylim
        self.xscale, self.yscale, self.fmts = xscale, yscale, fmts
        self.nrows, self.ncols, self.figsize = nrows, ncols, figsize
        self.X: list[list[float]] = []
        self.Y: list[list[float]] = []

    def add(self, x: Any, y: Any) -> None:
        """Add a point to each curve: y has one value for each, and x one place for all or one for each; None: no point.

        Raises: ShapeError, which is also a ValueError: another number of values than there are curves.
        """
        values = list(y) if _is_row(y) else [y]
        places = list(x) if _is_row(x) else [x] * len(values)
        self.X = self.X or [[] for _ in values]
        self.Y = self.Y or [[] for _ in values]
        if not len(places) == len(values) == len(self.Y):
            raise also(ShapeError, ValueError)(
                f"there are {len(self.Y)} curves, but {len(places)} places and {len(values)} values; give one for each."
            )
        for curve, (place, value) in enumerate(zip(places, values, strict=True)):
            if place is not None and value is not None:
                self.X[curve].append(float(place))
                self.Y[curve].append(float(value))

    def draw(self) -> Figure:
        """Return the curves as a figure. Raises: MissingExtraError: matplotlib is not installed."""
        from manyheads.extras.inspect.drawings.figure import new_figure

        axes = new_figure(*self.figsize).subplots(self.nrows, self.ncols, squeeze=False)[0, 0]
        longest = max(map(len, self.X), default=0)  # matplotlib draws nothing where a curve has no number
        x, y = ([row + [math.nan] * (longest - len(row)) for row in rows] for rows in (self.X, self.Y))
        scales = (self.xscale, self.yscale)
        return plot(
            x, y, self.xlabel, self.ylabel, self.legend, self.xlim, self.ylim, *scales, self.fmts, self.figsize, axes
        )


def _is_row(x: Any) -> bool:
    """Return whether x is several numbers; a tensor without axes is one."""
    return hasattr(x, "__len__") and getattr(x, "ndim", 1) > 0


class HyperParameters:
    """`save_hyperparameters` makes the arguments of the constructor that calls it attributes; hparams has them, too."""

    def save_hyperparameters(self, ignore: Sequence[str] = ()) -> None:
        """Store the caller's arguments but those to ignore, and those whose names begin with _."""
        given = sys._getframe(1).f_locals
        self.hparams = {
            name: value for name, value in given.items() if name not in ("self", *ignore) and not name.startswith("_")
        }
        for name, value in self.hparams.items():
            setattr(self, name, value)


class Module(nn.Module, HyperParameters):
    """The base class of the English edition's modules."""


def add_to_class(Class: type) -> Callable[[Callable[..., Any]], None]:  # noqa: N803
    """Return a decorator that makes a function a method of a class that exists.

    >>> class Counter:
    ...     count = 3
    >>> @add_to_class(Counter)
    ... def twice(self):
    ...     return 2 * self.count
    >>> Counter().twice()
    6
    """
    return lambda function: setattr(Class, function.__name__, function)


def grad_clipping(net: nn.Module, theta: float) -> None:
    """Scale all gradients so that their norm is at most theta."""
    nn.utils.clip_grad_norm_(net.parameters(), theta)


def check_shape(a: Tensor, shape: Sequence[int]) -> None:
    """Check a tensor's shape. Raises: ShapeError, which is also an AssertionError: it has another one."""
    if not hasattr(a, "shape"):
        raise no_tensor("a", a, ", ".join(map(str, shape)))
    if tuple(a.shape) != tuple(shape):
        raise also(ShapeError, AssertionError)(f"the tensor has shape {tuple(a.shape)}, not {tuple(shape)}.")


def show_heatmaps(
    matrices: Tensor,
    xlabel: str,
    ylabel: str,
    titles: Sequence[str] | None = None,
    figsize: tuple[float, float] = (2.5, 2.5),
    cmap: str = "Reds",
) -> Figure:
    """Draw matrices as colours, in rows and columns of panels.

    Shape: matrices (rows, columns, queries, keys). Returns: the figure, which a notebook shows; `savefig` writes it.
    Raises: MissingExtraError: matplotlib is not installed.
    """
    from manyheads.extras.inspect.drawings.figure import add_colour_bar, as_array, new_figure

    check_axes("matrices", matrices, "rows, columns, queries, keys", ValueError, TypeError)
    if not matrices.numel():
        raise also(ShapeError, ValueError)(f"matrices has shape {tuple(matrices.shape)}; there is nothing to draw.")
    if titles and len(titles) < matrices.shape[1]:
        raise also(ShapeError, IndexError)(
            f"there are {len(titles)} titles for {matrices.shape[1]} columns; give one for each column."
        )
    figure = new_figure(*figsize)
    axes = figure.subplots(*matrices.shape[:2], sharex=True, sharey=True, squeeze=False)
    for row, column in ((row, column) for row in range(len(axes)) for column in range(len(axes[0]))):
        panel = axes[row, column]
        image = panel.imshow(as_array(matrices[row, column]), cmap=cmap)
        if row == len(axes) - 1:
            panel.set_xlabel(xlabel)
        if column == 0:
            panel.set_ylabel(ylabel)
        if titles:
            panel.set_title(titles[column])
    add_colour_bar(figure, image, axes, shrink=0.6)
    return figure


def plot(
    X: Any,  # noqa: N803
    Y: Any = None,  # noqa: N803
    xlabel: str | None = None,
    ylabel: str | None = None,
    legend: Sequence[str] | None = None,
    xlim: Sequence[float] | None = None,
    ylim: Sequence[float] | None = None,
    xscale: str = "linear",
    yscale: str = "linear",
    fmts: Sequence[str] = (),
    figsize: tuple[float, float] = (3.5, 2.5),
    axes: Any = None,
) -> Figure:
    """Draw curves: Y over X, or X over its positions. Of several curves, each is a row.

    Args: fmts: matplotlib's formats of the curves in turn; none: lines in colours. axes: to draw in; None: new ones.
    Returns and raises: as `show_heatmaps`.
    """
    from manyheads.extras.inspect.drawings.figure import COLOURS, as_array, new_figure, style_axes

    places, curves = (None, as_array(X)) if Y is None else (as_array(X), as_array(Y))
    curves = curves.reshape(-1, curves.shape[-1])
    axes = new_figure(*figsize).subplots() if axes is None else axes
    for number, curve in enumerate(curves):
        along = range(len(curve)) if places is None else places if places.ndim == 1 else places[number]
        if len(along) != len(curve):
            raise also(ShapeError, ValueError)(
                f"X has {len(along)} places, but a curve of Y has {len(curve)} values; each value needs one place."
            )
        drawn = axes.plot(along, curve, *([fmts[number % len(fmts)]] if fmts else []))
        if not fmts:
            drawn[0].set_color(COLOURS[number % len(COLOURS)])
    style_axes(axes, x_label=xlabel or "", y_label=ylabel or "")
    axes.set(xlim=xlim, ylim=ylim, xscale=xscale, yscale=yscale)
    if legend:
        axes.legend(legend)
    figure: Figure = axes.figure
    return figure
