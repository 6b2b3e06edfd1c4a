"""Plots of label smoothing: the target distribution, and the loss by the probability of the correct token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.figure import COLOURS, INK, add_colour_bar, as_array, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from manyheads.nn.smoothing import SmoothingKind

__all__ = ["label_smoothing_figure", "losses_by_probability", "smoothing_figure"]


def smoothing_figure(
    shares: Sequence[float], targets: Sequence[int], *, vocab_size: int, kind: SmoothingKind, pad_id: int
) -> Figure:
    """Draw the losses of several smoothings, and the target distribution of the last one.

    Args:
        shares: for each smoothing, the probability that all tokens share.
        targets: correct tokens at some positions.

    Raises: MissingExtraError: no matplotlib.
    """
    import torch

    from manyheads.nn.kernels.loss import smoothed_targets

    sure = torch.linspace(1 / vocab_size, 0.999, 200)
    losses = {f"smoothing {share:g}": losses_by_probability(sure, share, vocab_size, kind, pad_id) for share in shares}
    asked = smoothed_targets(torch.tensor(targets), vocab_size, shares[-1], kind, pad_id)
    title = f"Targets with smoothing {shares[-1]:g} ({kind.replace('_', ' ')})"
    return label_smoothing_figure(asked, sure, losses, title=title, pad_id=pad_id)


def losses_by_probability(
    probabilities: Tensor, smoothing: float, vocab_size: int, kind: SmoothingKind, pad_id: int
) -> list[float]:
    """Return the smoothed loss at each probability of the correct token; the other tokens share the rest evenly."""
    import torch

    from manyheads.nn.kernels.loss import smoothed_loss

    # The head's own loss of log-probabilities: an identity in place of its matrix leaves them as they are.
    identity, correct = torch.eye(vocab_size), torch.tensor([(pad_id + 1) % vocab_size])
    losses = []
    for probability in probabilities:
        others = ((1 - probability) / (vocab_size - 1)).repeat(1, vocab_size)
        log_probs = others.index_fill(1, correct, probability.item()).log()
        losses.append(float(smoothed_loss(log_probs, correct, identity, None, smoothing, 1, kind, pad_id)[0]))
    return losses


def label_smoothing_figure(
    targets: Any,
    probabilities: Any,
    losses: Mapping[str, Any],
    *,
    title: str = "Target distribution",
    pad_id: int | None = None,
) -> Figure:
    """Draw the target distribution and the loss by the probability of the correct token (as in the Annotated
    Transformer).

    Args:
        targets: (tokens, vocab_size), the smoothed target distribution at each position.
        probabilities: (n,), probability that a model gives to the correct token.
        losses: name -> (n,), the loss at those probabilities.
        title: title of the targets.
        pad_id: the padding token. Its column is labelled, and a row of zeros is a position without loss.

    Raises: ShapeError: another rank or length. MissingExtraError: no matplotlib.
    """
    asked, sure = as_array(targets), as_array(probabilities)
    if asked.ndim != 2 or 0 in asked.shape:
        raise ShapeError(f"target distributions of shape {asked.shape}; expected (tokens, vocab_size).")
    figure = new_figure(10.5, 4.0)
    left, right = figure.subplots(1, 2)
    image = left.imshow(asked, cmap="Blues", vmin=0.0, aspect="auto", interpolation="nearest")
    style_axes(left, title=title, x_label="token id", y_label="place", grid=False)
    for axis, count in ((left.xaxis, asked.shape[1]), (left.yaxis, asked.shape[0])):
        if count <= 12:
            axis.set_ticks(range(count))
    if pad_id is not None and asked.shape[1] <= 12:
        left.xaxis.set_ticklabels([f"{n}\npadding" if n == pad_id else str(n) for n in range(asked.shape[1])])
    if asked.size <= 60:
        for (row, column), value in np.ndenumerate(asked):
            if pad_id is not None and not asked[row].any():
                continue  # padding is no class, and has no distribution
            shade = "white" if value > 0.6 * asked.max() else INK
            left.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=8.5, color=shade)
    add_colour_bar(figure, image, left, pad=0.02)
    for number, (name, values) in enumerate(losses.items()):
        array = as_array(values)
        if array.shape != sure.shape:
            raise ShapeError(f"{name}: {array.shape} losses for {sure.shape} probabilities.")
        right.plot(sure, array, color=COLOURS[number % len(COLOURS)], linewidth=2.0, label=name)
    style_axes(right, title="Loss by confidence", x_label="probability of the correct token", y_label="loss in nats")
    right.set_ylim(bottom=0)
    if losses:
        right.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="best")
    return figure
