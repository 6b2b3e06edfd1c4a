"""Plots of hashed attention: the bucket of every token in every round and head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import RequestError, ShapeError
from manyheads.extras.inspect.drawings.attention_views import shown_token
from manyheads.extras.inspect.drawings.figure import INK, as_array, new_figure, plain_text, slant_long, style_axes
from manyheads.extras.inspect.drawings.fonts import legible_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from manyheads.nn.attention.lsh_settings import LSHSettings

__all__ = ["buckets_figure", "layer_buckets_figure"]

_MOST_NUMBERED = 60
"""Positions that a cell's number can still be read at."""


def buckets_figure(
    buckets: Any, *, tokens: Sequence[str] | None = None, chunk_len: int = 0, head: int = 0, title: str = "Buckets"
) -> Figure:
    """Draw the buckets of all heads and rounds in text order, and one head's tokens sorted by bucket.

    Paper: Kitaev et al. 2020, arXiv:2001.04451, figure 2: the same sequence, hashed, sorted and split into chunks.
    Args:
        buckets: (heads, rounds, length), whole numbers.
        tokens: a label per position.
        chunk_len: chunk length of the sorted sequence; 0 draws no chunk boundaries.
        head: the head that is drawn sorted, from 0.

    Raises: ShapeError: another rank, another number of tokens, or no such head. MissingExtraError: no matplotlib.
    """
    array = as_array(buckets).astype(int)
    if array.ndim != 3 or 0 in array.shape:
        raise ShapeError(f"buckets of shape {array.shape}; expected (heads, rounds, length).")
    heads, rounds, length = array.shape
    if tokens is not None and len(tokens) != length:
        raise ShapeError(f"{len(tokens)} tokens for buckets of {length} positions.")
    if not 0 <= head < heads:
        raise ShapeError(f"there is no head {head}; the heads are 0 to {heads - 1}.")
    names = [str(place) for place in range(length)] if tokens is None else [shown_token(token) for token in tokens]
    figure = new_figure(float(np.clip(0.32 * length + 2, 7, 22)), 3.4 + 0.26 * heads * rounds + 0.5 * rounds, title)
    above, below = figure.subplots(2, 1, height_ratios=[heads * rounds + 1, 2 * rounds + 1])
    top = int(array.max())
    _cells(above, array.reshape(heads * rounds, length), array.reshape(heads * rounds, length), top)
    above.set_yticks(
        range(heads * rounds), [f"head {h + 1}, round {r + 1}" for h in range(heads) for r in range(rounds)]
    )
    style_axes(above, title="In the order of the text: the number of each token's bucket", grid=False)
    _name(above, names)
    order = np.argsort(array[head], axis=1, kind="stable")
    ordered = np.take_along_axis(array[head], order, axis=1)
    _cells(below, ordered, None, top)
    for row, change in zip(*np.nonzero(ordered[:, 1:] != ordered[:, :-1]), strict=True):
        # There are more buckets than the twenty colours, so neighbouring buckets may have the same colour.
        below.plot([change + 0.5] * 2, [row - 0.5, row + 0.5], color="white", linewidth=1.6)
    below.set_yticks(range(rounds), [f"round {r + 1}" for r in range(rounds)])
    cut = f", cut into chunks of {chunk_len}" if chunk_len else ""
    style_axes(below, title=f"Head {head + 1}, sorted by bucket{cut}", grid=False)
    below.set_xticks([])
    if length <= _MOST_NUMBERED:
        shown, families = legible_texts(names)
        for (row, column), place in np.ndenumerate(order):
            label = shown[place] if len(shown[place]) <= 8 else f"{shown[place][:7]}…"
            turn = 90 if len(label) > 2 else 0
            text = below.text(column, row, label, rotation=turn, ha="center", va="center", fontsize=7.5)
            text.set_fontfamily(families)
            plain_text([text])
    for edge in range(chunk_len, length, chunk_len) if chunk_len else ():
        below.axvline(edge - 0.5, color=INK, linewidth=1.4)
    return figure


def layer_buckets_figure(
    found: Mapping[str, Any], tokens: Sequence[str], settings: LSHSettings, layer: int | None, head: int
) -> Figure:
    """Draw the buckets of one of a model's layers that hash.

    Args:
        found: name of each layer -> its buckets.
        settings: of the layers.
        layer: counted from 1; None: the last one.
        head: the one that is drawn sorted, counted from 1.

    Raises: RequestError: there is no such layer or head. MissingExtraError: no matplotlib.
    """
    names = list(found)
    layer = len(names) if layer is None else layer
    if not 1 <= layer <= len(names):
        listed = ", ".join(f"{number} ({name})" for number, name in enumerate(names, 1))
        raise RequestError(f"--layer {layer}: there is no such layer; these layers hash: {listed}.")
    name = names[layer - 1]
    if not 1 <= head <= len(found[name]):
        raise RequestError(f"--head {head}: there are heads 1 to {len(found[name])}.")
    chunk_len = settings.chunk_len if settings.visible == "chunk" else 0
    return buckets_figure(found[name], tokens=tokens, chunk_len=chunk_len, head=head - 1, title=f"Buckets of {name}")


def _cells(axes: Axes, values: Any, numbers: Any, top: int) -> None:
    """Draw cells; neighbouring buckets get very different colours, so that equal buckets can be recognised."""
    spread = (values * 7) % 20
    axes.imshow(spread, cmap="tab20", vmin=0, vmax=19, aspect="auto", interpolation="nearest", alpha=0.55)
    if numbers is not None and values.shape[1] <= _MOST_NUMBERED and top < 1000:
        for (row, column), value in np.ndenumerate(numbers):
            axes.text(column, row, str(value), ha="center", va="center", fontsize=7.5, color=INK)


def _name(axes: Axes, names: Sequence[str]) -> None:
    stride = math.ceil(len(names) / _MOST_NUMBERED)
    places = list(range(0, len(names), stride))
    shown, families = legible_texts(
        [names[place] if len(names[place]) <= 16 else f"{names[place][:15]}…" for place in places]
    )
    axes.set_xticks(places, shown, fontsize=8)
    plain_text(axes.get_xticklabels())
    slant_long(axes.get_xticklabels())
    for text in axes.get_xticklabels():
        text.set_fontfamily(families)
