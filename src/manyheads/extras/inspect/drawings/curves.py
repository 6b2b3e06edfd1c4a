"""What was measured: learning curves of one run and of several, the loss by memory, and the confusion of labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import ConfigError, DataError, MissingExtraError, SaveError, ShapeError
from manyheads.extras.inspect.drawings.figure import (
    COLOURS,
    INK,
    MUTED,
    Array,
    add_colour_bar,
    as_array,
    legible_texts,
    new_figure,
    plain_text,
    save_figure,
    slant_long,
    style_axes,
)
from manyheads.training.record.log import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SCORES = (("bleu", "BLEU"), ("f1", "F1"))
_STYLES = ("-", "--", ":", "-.")


def series(records: Iterable[Mapping[str, Any]], key: str) -> tuple[Array, Array]:
    """Return steps and values of one metric in the order of steps.

    If a step occurs twice (in a resumed run), the later record is used. Records without the key and values that are not
    finite are left out.
    """
    points: dict[float, float] = {}
    for record in records:
        step, value = record.get("step"), record.get(key)
        if isinstance(step, int | float) and isinstance(value, int | float) and math.isfinite(value):
            points[float(step)] = float(value)
    steps = sorted(points)
    return np.asarray(steps, dtype=np.float64), np.asarray([points[step] for step in steps], dtype=np.float64)


def learning_curve_figure(records: Iterable[Mapping[str, Any]], *, title: str = "") -> Figure:
    """Draw training and validation loss, BLEU, chrF and F1 if available, and the learning rate, over steps.

    Args: records: those of `Metrics`, or any other dicts with `step` and any of train_nll, train_loss, valid_nll,
        valid_loss, bleu, chrf, f1, learning_rate and grad_norm.

    Raises: MissingExtraError: no matplotlib.
    """
    records = list(records)
    scored = any(len(series(records, key)[0]) for key in ("bleu", "chrf", "f1"))
    figure = new_figure(11.0, 5.2, title)
    grid = figure.add_gridspec(2 if scored else 1, 2, width_ratios=[1.7, 1.0])
    _loss(figure.add_subplot(grid[:, 0]), records)
    if scored:
        _scores(figure.add_subplot(grid[0, 1]), records)
    _rate(figure.add_subplot(grid[-1, 1]), records)
    return figure


def _loss(axes: Axes, records: list[Mapping[str, Any]]) -> None:
    key, unit = ("nll", "nats a token") if len(series(records, "train_nll")[0]) else ("loss", "loss")
    steps, values = series(records, f"train_{key}")
    smooth = _smooth(values)
    if len(steps) > 20:
        axes.plot(steps, values, color=COLOURS[0], alpha=0.25, linewidth=0.9)
    if len(steps):
        dot = "o" if len(steps) == 1 else None  # a line with one point would be invisible
        label = f"training{'' if smooth is values else ', smoothed'}  {smooth[-1]:.3f}"
        axes.plot(steps, smooth, color=COLOURS[0], linewidth=2.0, marker=dot, label=label)
    steps, valid = series(records, f"valid_{key}")
    if len(steps):
        best = int(valid.argmin())
        axes.plot(
            steps,
            valid,
            color=COLOURS[1],
            linewidth=2.0,
            marker="o",
            markersize=4.5,
            label=f"validation  {valid[-1]:.3f}, best {valid[best]:.3f}",
        )
        ring, *_ = axes.plot(steps[best], valid[best], "o", color=COLOURS[1], markersize=10, markerfacecolor="none")
        ring.set_clip_on(False)  # the last step is at the axes' edge
    both = np.concatenate([smooth, valid])
    if len(both) > 5:
        # The first losses of a run are much larger than the rest; clip them so that the rest stays readable.
        low, high = float(both.min()), float(np.quantile(both, 0.98))
        axes.set_ylim(low - 0.07 * (high - low) - 1e-3, high + 0.1 * (high - low) + 1e-3)
    style_axes(axes, title="Loss", x_label="step", y_label=unit)
    if len(both):
        # In the upper right corner, unless curves go through it, as those of short runs do.
        axes.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="best")
    else:
        axes.text(0.5, 0.5, "no figures yet", transform=axes.transAxes, ha="center", color=MUTED)
    _from_zero(axes)


def _scores(axes: Axes, records: list[Mapping[str, Any]]) -> None:
    for key, name, colour in (("bleu", "BLEU", COLOURS[2]), ("chrf", "chrF", COLOURS[3]), ("f1", "F1", COLOURS[2])):
        steps, values = series(records, key)
        if len(steps):
            label = f"{name}  {values[-1]:.1f}"
            axes.plot(steps, values, color=colour, linewidth=1.8, marker="o", markersize=3.5, label=label)
    style_axes(axes, title=f"Validation scores{_part(records)}")
    _from_zero(axes)
    # Leave space above the curves for their labels, which would overlap at the curves' ends.
    # Scores go up to 100; below 10 the axis stays, so that a score of almost zero looks like one.
    axes.set_ylim(bottom=0, top=min(max(axes.get_ylim()[1], 10.0) * 1.3, 130.0))
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper left", ncols=2)


def _part(records: list[Mapping[str, Any]]) -> str:
    """Return ` of the first 100`, if scores are of a part."""
    counts = {int(count) for count in series(records, "of_the_first")[1]}
    return f" of the first {' or '.join(f'{count:,}' for count in sorted(counts))}" if counts else ""


def _rate(axes: Axes, records: list[Mapping[str, Any]]) -> None:
    steps, values = series(records, "learning_rate")
    axes.fill_between(steps, values, color=COLOURS[0], alpha=0.12, linewidth=0)
    axes.plot(steps, values, color=COLOURS[0], linewidth=1.6)
    style_axes(axes, title="Learning rate", x_label="step")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    axes.yaxis.get_offset_text().set_fontsize(8)
    _from_zero(axes)
    axes.set_ylim(bottom=0)
    steps, norms = series(records, "grad_norm")
    if len(steps) > 1:
        other = axes.twinx()
        other.plot(steps, _smooth(norms), color=MUTED, linewidth=1.0)
        style_axes(other, y_label="gradient norm", grid=False)
        other.spines["left"].set_visible(False)
        other.set_ylabel("gradient norm", color=MUTED, fontsize=8.5)
        other.tick_params(colors=MUTED)
        other.set_ylim(bottom=0, top=float(np.quantile(norms, 0.98)) * 1.5 or 1.0)


def _from_zero(axes: Axes) -> None:
    """Start the axis at step 0 and use whole steps only."""
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]


def _smooth(values: Array) -> Array:
    """Return a centred running mean over about a thirtieth of the points, which shows the trend without noise."""
    width = len(values) // 30
    if width < 2:
        return values
    kernel = np.ones(2 * (width // 2) + 1)
    weight = np.convolve(np.ones_like(values), kernel, mode="same")
    smoothed: Array = np.convolve(values, kernel, mode="same") / weight
    return smoothed


def compared_curves_figure(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw the validation loss of each run over its steps, and beside it BLEU or F1 if a run has it.

    Args: runs: name -> records of its metrics.jsonl.

    Raises: ConfigError: no run has a validation. MissingExtraError: no matplotlib.
    """
    panels = [("valid_nll", "Validation loss", "nats a token")]
    panels += [(key, name, "") for key, name in _SCORES if any(len(series(r, key)[0]) for r in runs.values())]
    if not any(len(series(records, "valid_nll")[0]) for records in runs.values()):
        raise ConfigError("None of these runs has a validation yet, so there is no curve to draw.")
    figure = new_figure(6.5 * len(panels), 4.8)
    for place, (key, title, unit) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for number, (name, records) in enumerate(runs.items()):
            steps, values = series(records, key)
            if len(steps):
                last = values.min() if key == "valid_nll" else values.max()
                axes.plot(
                    steps,
                    values,
                    color=COLOURS[number % len(COLOURS)],
                    linestyle=_STYLES[number // len(COLOURS) % len(_STYLES)],
                    marker="o",
                    markersize=3,
                    linewidth=1.8,
                    label=f"{name if name[:1] != '_' else f'./{name}'}  {last:.3g}",  # matplotlib hides labels with _
                )
        part = "" if key == "valid_nll" else _part([one for records in runs.values() for one in records])
        style_axes(axes, title=title + part, x_label="step", y_label=unit)
        axes.set_xlim(left=0)
        legend = axes.legend(frameon=False, fontsize=9, labelcolor=INK, title="best", loc="best", title_fontsize=9)
        plain_text(legend.get_texts())
    return figure


class CurvePainter:
    """Redraws plots/learning-curve.png and .svg from metrics.jsonl.

    Args:
        metrics: the file of records.
        plots: folder of the plots.
        warn: called once if no plot can be drawn.
    """

    def __init__(self, metrics: Path, plots: Path, warn: Callable[[str], None]) -> None:
        self._metrics = metrics
        self._records: Metrics | None = None
        self._plots = plots
        self._warn = warn
        self._off = False
        self._drawn: tuple[int, tuple[Path, ...]] = (-1, ())

    def draw(self) -> tuple[Path, ...]:
        """Return the paths of the plots; none if they could not be drawn, which never ends a run."""
        if self._off:
            return ()
        try:
            size = self._metrics.stat().st_size
            if size != self._drawn[0]:  # at the end of a run the last validation has already drawn it
                self._records = self._records or Metrics(self._metrics)
                figure = learning_curve_figure(self._records.read())
                self._drawn = (size, save_figure(figure, self._plots / "learning-curve"))
            return self._drawn[1]
        except Exception as error:
            self._off = True
            expected = isinstance(error, MissingExtraError | SaveError | DataError | OSError)
            self._warn(f"No learning curve: {error if expected else f'{type(error).__name__}: {error}'}")
            return ()


def memory_figure(memory_lens: Sequence[int], losses: Sequence[float], *, unit: str, title: str) -> Figure:
    """Draw one point per memory length.

    Args:
        memory_lens: memory lengths, in tokens per layer.
        losses: loss at each, in nats or bits.
        unit: unit of the losses.
        title: the text that was read.

    Raises: MissingExtraError: no matplotlib.
    """
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    points = sorted(zip(memory_lens, losses, strict=True))
    lens, values = [length for length, _ in points], [loss for _, loss in points]
    axes.plot(lens, values, color=COLOURS[0], linewidth=2.0, marker="o", markersize=5)
    for length, value in points:
        axes.annotate(
            f"{value:.3f}", (length, value), (6, 6), textcoords="offset points", fontsize=8, color=INK, ha="left"
        )
    style_axes(axes, title=title, x_label="memory, tokens per layer", y_label=unit)
    axes.margins(y=0.18)
    return figure


_MOST_NUMBERED = 30
"""Labels up to which each cell shows its count."""


def confusion_figure(counts: Any, labels: Sequence[str], *, title: str = "Confusion matrix") -> Figure:
    """Draw a cell for each pair of a right and a predicted label; its colour is the share of the row.

    Args: counts: (labels, labels), rows are right labels; labels: their names.

    Raises: ShapeError: the counts have another shape. MissingExtraError: no matplotlib.
    """
    array = as_array(counts)
    if array.shape != (len(labels), len(labels)) or not len(labels):
        raise ShapeError(
            f"counts of shape {array.shape}; expected a row and a column for each of {len(labels)} labels."
        )
    shares = array / np.maximum(array.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(0.62 * len(labels) + 2.6, 5.0, 22.0))
    figure = new_figure(side + 0.8, side, title)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    names, families = legible_texts(labels)
    axes.set_xticks(range(len(labels)), names)
    axes.set_yticks(range(len(labels)), names)
    style_axes(axes, x_label="predicted label", y_label="right label", grid=False)
    slant_long(axes.get_xticklabels())
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_fontfamily(families)
    plain_text([*axes.get_xticklabels(), *axes.get_yticklabels()])
    if len(labels) <= _MOST_NUMBERED:
        for (row, column), count in np.ndenumerate(array):
            colour = "white" if shares[row, column] > 0.55 else INK
            axes.text(column, row, f"{int(count):,}", ha="center", va="center", fontsize=8.5, color=colour)
    add_colour_bar(figure, image, axes, shrink=0.75).set_label("share of the right label", fontsize=9, color=INK)
    return figure
