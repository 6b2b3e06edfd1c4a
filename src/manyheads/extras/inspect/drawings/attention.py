"""Attention of a model: what is shown of it, heat maps of its heads, and the buckets of hashed layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from manyheads.errors import RequestError, ShapeError
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
    slant_long,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from manyheads.nn.attention.settings import LSHSettings

_JOINERS = "\u200c\u200d"
"""Invisible joiners. Without them the characters around them would be other letters, or several emoji."""


@dataclass(frozen=True, kw_only=True)
class AttentionView:
    """The attention weights of every layer and head of one stack.

    Shape: layers: one (heads, q_len, k_len) per layer; all layers of a view have the same lengths.

    name: `encoder`, `decoder`, `cross`. query_tokens: a label per row; key_tokens: a label per column. num_memory:
    number of memory columns at the left; the first query follows them. is_self: queries and keys are one sequence, so
    distances are defined. block: (rows, columns) of tokens per cell; see `thinned`. figures: entropy and mean distance
    of each head, from weights before thinning: (layers, heads, 2). buckets: of hashed layers, (heads, rounds, length),
    None for others; thinning drops them, because a cell then contains tokens of several buckets.
    """

    name: str
    layers: tuple[Array, ...]
    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    num_memory: int = 0
    is_self: bool = True
    block: tuple[int, int] = (1, 1)
    figures: tuple[tuple[tuple[float | None, float | None], ...], ...] = ()
    buckets: tuple[npt.NDArray[np.int64] | None, ...] = ()


def attention_view(
    name: str,
    layers: Sequence[Any],
    *,
    query_tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    num_memory: int = 0,
    is_self: bool | None = None,
    buckets: Sequence[Any] = (),
) -> AttentionView:
    """Check the arguments and return a view.

    Args:
        name: name of the stack.
        layers: weights of each, (heads, q_len, k_len), or (1, heads, q_len, k_len) as from `attentions_of` and Hugging
            Face's models.
        query_tokens: a label per row.
        key_tokens: a label per column; None: those of the queries.
        num_memory: number of memory columns at the left.
        is_self: whether distances are defined; None: yes, unless other keys are given.
        buckets: a layer's (heads, rounds, length), or None for a layer without hashing; empty if no layer hashes.

    Raises: ShapeError: no layer, another rank, more than one sequence, or a wrong number of tokens.
    """
    own = key_tokens is None
    keys = tuple(query_tokens if key_tokens is None else key_tokens)
    arrays = []
    for number, layer in enumerate(layers):
        array = as_array(layer)
        if array.ndim == 4 and array.shape[0] == 1:
            array = array[0]
        if array.ndim != 3 or 0 in array.shape:
            raise ShapeError(
                f"{name}, layer {number + 1}: attention weights of shape {array.shape}; expected (heads, q_len, k_len)"
                " of one sequence."
            )
        if array.shape[1:] != (len(query_tokens), len(keys)):
            raise ShapeError(
                f"{name}, layer {number + 1}: {len(query_tokens)} query tokens and {len(keys)} key tokens for weights"
                f" of shape {array.shape}; give one label per row and one per column."
            )
        arrays.append(array)
    if not arrays:
        raise ShapeError(f"{name}: no layer; give at least one.")
    hashed = tuple(None if one is None else as_array(one).astype(np.int64) for one in buckets)
    for number, one in enumerate(hashed):
        if one is not None and (one.ndim != 3 or one.shape[::2] != (len(arrays[number]), len(keys))):
            raise ShapeError(
                f"{name}, layer {number + 1}: buckets of shape {one.shape}; expected (heads, rounds, length)."
            )
    is_self = own or num_memory > 0 if is_self is None else is_self
    return AttentionView(
        name=name,
        layers=tuple(arrays),
        query_tokens=tuple(map(shown_token, query_tokens)),
        key_tokens=tuple(map(shown_token, keys)),
        num_memory=num_memory,
        is_self=is_self,
        buckets=hashed,
        figures=tuple(tuple(head_figures(head, num_memory if is_self else None) for head in array) for array in arrays),
    )


def head_figures(weights: Array, first_query: int | None) -> tuple[float | None, float | None]:
    """Return the mean over queries of the attention's entropy in bits and of its distance in tokens.

    Args:
        weights: (q_len, k_len); rows of zeros are left out.
        first_query: the column of the first query; None: distances are not defined.

    Returns: two numbers; None for an undefined one.
    """
    looking = weights.sum(axis=1) > 0
    if not looking.any():
        return None, None
    rows = weights[looking]
    logs = np.log2(rows, out=np.zeros_like(rows), where=rows > 0)
    entropy = float(-(rows * logs).sum(axis=1).mean())
    if first_query is None:
        return abs(entropy), None
    queries = np.arange(weights.shape[0])[looking] + first_query
    distances = np.abs(queries[:, None] - np.arange(weights.shape[1])[None])
    return abs(entropy), float((rows * distances).sum(axis=1).mean())


def thinned(view: AttentionView, most: int) -> AttentionView:
    """Return the view with at most `most` rows and columns, by merging neighbours into one cell.

    A cell contains the mean over its queries of the sum over its keys, so a row still sums to one. Memory and segment
    never share a cell.

    Raises: ShapeError: most is below 1.
    """
    if most < 1:
        raise ShapeError(f"pictures of at most {most} rows cannot be drawn; allow at least 1.")
    q_len, k_len = len(view.query_tokens), len(view.key_tokens)
    rows, columns = math.ceil(q_len / most), math.ceil(k_len / most)
    if rows == columns == 1:
        return view
    row_starts = list(range(0, q_len, rows))
    column_starts = [*range(0, view.num_memory, columns), *range(view.num_memory, k_len, columns)]
    counts = np.diff([*row_starts, q_len])
    layers = tuple(
        np.add.reduceat(np.add.reduceat(layer, column_starts, axis=2), row_starts, axis=1) / counts[None, :, None]
        for layer in view.layers
    )
    return replace(
        view,
        layers=layers,
        query_tokens=_joined(view.query_tokens, row_starts),
        key_tokens=_joined(view.key_tokens, column_starts),
        num_memory=math.ceil(view.num_memory / columns),
        block=(rows, columns),
        buckets=(),
    )


def _joined(tokens: tuple[str, ...], starts: list[int]) -> tuple[str, ...]:
    ends = [*starts[1:], len(tokens)]
    return tuple(" ".join(tokens[start:end]) for start, end in zip(starts, ends, strict=True))


def shown_token(token: str) -> str:
    """Return a token without characters that could move, hide or reverse the text beside it."""
    alone = not token.strip(_JOINERS + "₁₂₃₄")  # only joiners, or a byte of one: there is nothing to join
    shown = "".join(
        char if char.isprintable() or (char in _JOINERS and not alone) else f"⟨{ord(char):04X}⟩" for char in token
    )
    return shown or "⟨⟩"


MAX_LABELS = 40
"""If an axis has more tokens than this, only every second, third ... token is labelled."""
MAX_SMALL_LABELS = 16
"""The same limit if one of many heads is drawn."""
MAX_FLAT_CHARS = 70
"""Characters of all labels together that have space below the columns of a picture; more are rotated."""


def attention_figure(
    weights: Any,
    *,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    title: str = "",
    query_name: str = "query",
    key_name: str = "key",
    mean: bool = True,
    num_memory: int = 0,
) -> Figure:
    """Draw one heat map per head with a common colour scale; rows are queries, columns are keys.

    For long sequences the colours show the square root of the weights, and the scale says so. Otherwise a few large
    weights, as in the first rows of a causal model, would make all others invisible.

    Args:
        weights: (q_len, k_len), or (heads, q_len, k_len).
        query_tokens: a label per row; key_tokens: a label per column.
        mean: show the mean of all heads first, and larger.
        num_memory: number of memory columns at the left, which a line separates from the others.

    Raises: ShapeError: weights of another rank, or a wrong number of labels. MissingExtraError: no matplotlib.
    """
    array = as_array(weights)
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or 0 in array.shape:
        raise ShapeError(f"attention weights of shape {array.shape}; expected (q_len, k_len) or (heads, q_len, k_len).")
    num_heads, q_len, k_len = array.shape
    for tokens, length, name in ((query_tokens, q_len, "query"), (key_tokens, k_len, "key")):
        if tokens is not None and len(tokens) != length:
            raise ShapeError(f"{len(tokens)} {name} tokens for weights with {length} {name} positions.")
    mean = mean and num_heads > 1
    columns = 1 if num_heads == 1 else min(4, math.ceil(math.sqrt(num_heads)))
    rows = math.ceil(num_heads / columns)
    cell_height = float(np.clip(0.22 * q_len, 1.7, 6.0)) if rows < 3 else 2.2
    cell_width = cell_height * float(np.clip(k_len / q_len, 0.6, 1.8))
    main = max(4.2, cell_height * rows) if mean or num_heads == 1 else 0.0
    main_width = main * float(np.clip(k_len / q_len, 0.6, 1.6))
    width = main_width + (cell_width * columns if num_heads > 1 else 0.0) + 1.9
    figure = new_figure(min(width, 24.0), min(max(main, cell_height * rows) + 1.7, 22.0), title)
    top, by_root = float(np.nanmax(array)) or 1.0, k_len > MAX_LABELS
    panels = _panels(figure, num_heads, rows, columns, mean, main_width / max(cell_width * columns, 0.1))
    image = None
    for panel, axes in panels:
        image = _heat_map(axes, array.mean(axis=0) if panel == "mean" else array[int(panel)], top, by_root)
        if num_memory:
            axes.axvline(num_memory - 0.5, color=COLOURS[1], linewidth=1.2)
        large = panel == "mean" or num_heads == 1
        name = "mean of all heads" if panel == "mean" else ("" if num_heads == 1 else f"head {int(panel) + 1}")
        style_axes(axes, title=name, grid=False)
        for side in axes.spines.values():
            side.set_visible(False)
        if large:
            axes.set_xlabel(key_name, fontsize=10, color=MUTED)
            axes.set_ylabel(query_name, fontsize=10, color=MUTED)
            _label(axes, "x", key_tokens, k_len)
            _label(axes, "y", query_tokens, q_len)
        else:
            axes.set_title(name, loc="left", fontsize=9, color=INK)
            head = int(panel)
            # Tokens are shown only at the outer edges of the grid: rows at its left, columns below each column's last
            # head.
            _label(axes, "x", key_tokens if head + columns >= num_heads else None, k_len, is_small=True)
            _label(axes, "y", query_tokens if head % columns == 0 else None, q_len, is_small=True)
    if image is not None:
        bar = add_colour_bar(figure, image, [axes for _, axes in panels], shrink=0.6, aspect=30, pad=0.015)
        bar.set_label(f"attention weight{', colour by square root' if by_root else ''}", fontsize=9, color=MUTED)
    return figure


def layer_figure(view: AttentionView, layer: int) -> Figure:
    """Draw one layer of a view, counted from 1: the mean of its heads, and each of them. Raises: MissingExtraError."""
    return attention_figure(
        view.layers[layer - 1],
        query_tokens=view.query_tokens,
        key_tokens=view.key_tokens,
        num_memory=view.num_memory,
        title=f"{view.name}, layer {layer} of {len(view.layers)}",
    )


def view_figure(views: Sequence[AttentionView], name: str | None, layer: int | None, most: int) -> Figure:
    """Draw one layer of one of a model's views.

    Args:
        name: of the view; None: the last one.
        layer: counted from 1; None: the last one.
        most: maximum number of rows and columns; longer texts are thinned.

    Raises: RequestError: there is no such view or layer. MissingExtraError: no matplotlib.
    """
    named = {view.name: view for view in views}
    if name is not None and name not in named:
        raise RequestError(f"--view {name}: this model shows {', '.join(named)}.")
    view = thinned(named[name or views[-1].name], most)
    layer = len(view.layers) if layer is None else layer
    if not 1 <= layer <= len(view.layers):
        raise RequestError(f"--layer {layer}: the {view.name} has layers 1 to {len(view.layers)}.")
    return layer_figure(view, layer)


def _panels(
    figure: Figure, num_heads: int, rows: int, columns: int, mean: bool, ratio: float
) -> list[tuple[str, Axes]]:
    """Return axes for the mean and for each head. All are in one grid, because a colour bar needs a single grid."""
    if not mean:
        grid = figure.add_gridspec(rows, columns)
        return [(str(h), figure.add_subplot(grid[h // columns, h % columns])) for h in range(num_heads)]
    grid = figure.add_gridspec(rows, 1 + columns, width_ratios=[max(ratio, 0.3) * columns] + [1.0] * columns)
    panels = [("mean", figure.add_subplot(grid[:, 0]))]
    return panels + [(str(h), figure.add_subplot(grid[h // columns, 1 + h % columns])) for h in range(num_heads)]


def _heat_map(axes: Axes, weights: Array, top: float, by_root: bool) -> Any:
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5 if by_root else 1.0, vmin=0.0, vmax=top)
    return axes.imshow(weights, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")


def _label(axes: Axes, which: str, tokens: Sequence[str] | None, length: int, *, is_small: bool = False) -> None:
    """Label the positions, evenly thinned if there are too many to read.

    Args: is_small: the axes of one of many heads; without tokens they get no labels.
    """
    if is_small and tokens is None:
        axes.set_xticks([]) if which == "x" else axes.set_yticks([])
        return
    stride = math.ceil(length / (MAX_SMALL_LABELS if is_small else MAX_LABELS))
    places = list(range(0, length, stride))
    names = [_short(tokens[place]) if tokens is not None else str(place) for place in places]
    names, families = legible_texts(names)
    size = 6 if is_small else 9.5 if length <= 24 else 8 if length <= MAX_LABELS else 7
    if which == "x":
        most = MAX_FLAT_CHARS // 3 if is_small else MAX_FLAT_CHARS
        flat = (max(map(len, names)) + 1) * len(names) <= most  # the longest label fits into its column
        axes.set_xticks(places, names, ha="center", fontsize=size)
        if not flat:
            slant_long(axes.get_xticklabels())
    else:
        axes.set_yticks(places, names, fontsize=size)
    labels = axes.get_xticklabels() if which == "x" else axes.get_yticklabels()
    plain_text(labels)
    for text in labels:
        text.set_fontfamily(families)


def _short(token: str) -> str:
    shown = "".join(char if char.isprintable() or char in "\u200c\u200d" else "�" for char in token)
    return shown if len(shown) <= 16 else shown[:15] + "…"


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
