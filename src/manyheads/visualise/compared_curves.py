"""The learning curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from manyheads.errors import ConfigError
from manyheads.visualise.curves import series
from manyheads.visualise.figure import COLOURS, INK, new_figure, plain_text, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["compared_curves_figure"]

_SCORES = (("bleu", "BLEU"), ("f1", "F1"))
_STYLES = ("-", "--", ":", "-.")


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
                    label=f"{name}  {last:.3g}",
                )
        style_axes(axes, title=title, x_label="step", y_label=unit)
        axes.set_xlim(left=0)
        legend = axes.legend(frameon=False, fontsize=9, labelcolor=INK, title="best", title_fontsize=9)
        plain_text(legend.get_texts())
    return figure
