"""Pictures of formulas: masks, position encodings, label smoothing and learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from manyheads.catalogue import PRESETS
from manyheads.config.checks import not_among
from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.extras.inspect.drawings.figure import (
    COLOURS,
    INK,
    MUTED,
    add_colour_bar,
    as_array,
    new_figure,
    style_axes,
)
from manyheads.nn.attention.local import local_attention, spread_chunks
from manyheads.nn.attention.masks import Causal, Lengths, Mask, Window, dense_mask
from manyheads.training.optim.schedule import learning_rate, noam

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import nn

    from manyheads.nn.shapes import Bool
    from manyheads.nn.smoothing import SmoothingKind


@dataclass(frozen=True, kw_only=True)
class MaskSizes:
    """The sizes of the examples.

    length: positions. lengths: real tokens of each row. left, right: keys that the window shows before and after a
    query. memory_len: stored positions. chunk_len: positions of a block. before, after: neighbouring blocks that a
    query sees; after is 0 for a causal layer.
    """

    length: int = 8
    lengths: tuple[int, ...] = (8, 5)
    left: int = 2
    right: int = 0
    memory_len: int = 4
    chunk_len: int = 3
    before: int = 1
    after: int = 0


@dataclass(frozen=True)
class MaskExample:
    """One mask as numbers.

    title: what it is, for people. formula: when query i may attend to key j. allowed: (q_len, k_len) bool; True = may
    attend. num_memory: columns at the left that belong to a memory.
    """

    kind: str
    title: str
    formula: str
    allowed: Bool[Tensor, "q_len k_len"]
    num_memory: int = 0


def mask_examples(kinds: tuple[str, ...], sizes: MaskSizes) -> list[MaskExample]:
    """Return the masks of these kinds, in this order; `padding` and `target` give one for each row.

    >>> [example] = mask_examples(("causal",), MaskSizes(length=2))
    >>> example.allowed.tolist()
    [[True, False], [True, True]]

    Args: kinds: names in `MASK_KINDS`.
    """
    return [example for kind in kinds for example in _MAKERS[kind](sizes)]


def _padding(sizes: MaskSizes) -> list[MaskExample]:
    rows = _rows(Lengths(torch.tensor(sizes.lengths)), sizes)
    return [
        MaskExample("padding", f"padding, {real} real tokens", f"j < {real}", allowed)
        for real, allowed in zip(sizes.lengths, rows, strict=True)
    ]


def _target(sizes: MaskSizes) -> list[MaskExample]:
    rows = _rows(Causal() & Lengths(torch.tensor(sizes.lengths)), sizes)
    return [
        MaskExample("target", f"causal and padding, {real} real tokens", f"j <= i and j < {real}", allowed)
        for real, allowed in zip(sizes.lengths, rows, strict=True)
    ]


def _causal(sizes: MaskSizes) -> list[MaskExample]:
    [allowed] = _rows(Causal(), sizes)
    return [MaskExample("causal", "causal", "j <= i", allowed)]


def _window(sizes: MaskSizes) -> list[MaskExample]:
    [allowed] = _rows(Window(left=sizes.left, right=sizes.right), sizes)
    title = f"window, {sizes.left} before and {sizes.right} after"
    return [MaskExample("window", title, f"i - {sizes.left} <= j <= i + {sizes.right}", allowed)]


def _memory(sizes: MaskSizes) -> list[MaskExample]:
    """The masks of a Transformer-XL: a segment after its memory, without and with `same_length`."""
    memory = sizes.memory_len
    [plain] = _rows(Causal(), sizes, memory)
    found = [MaskExample("memory", f"memory of {memory}", f"j <= i + {memory}", plain, memory)]
    if memory:
        [same] = _rows(Causal() & Window(left=memory - 1, right=None), sizes, memory)
        title = f"memory of {memory}, same length"
        found.append(MaskExample("memory", title, f"i < j <= i + {memory}", same, memory))
    return found


def _blocks(sizes: MaskSizes) -> list[MaskExample]:
    """The masks of a Reformer's local layers.

    The layers themselves compute them: a key with a weight above 0 is allowed.
    """
    nothing = torch.zeros(1, 1, sizes.length, 1)
    found: list[Tensor] = []
    causal, most = not sizes.after, sizes.length // sizes.chunk_len + 1  # more neighbours than chunks cost memory
    before, after = min(sizes.before, most), min(sizes.after, most)
    local_attention(
        nothing,
        nothing,
        nothing,
        chunk_len=sizes.chunk_len,
        chunks_before=before,
        chunks_after=after,
        causal=causal,
        weights_hook=found.append,
    )
    allowed = spread_chunks(found[0], before, sizes.length)[0, 0] > 0
    title = f"blocks of {sizes.chunk_len}, {sizes.before} before and {sizes.after} after"
    formula = f"-{sizes.before} <= j // {sizes.chunk_len} - i // {sizes.chunk_len} <= {sizes.after}"
    return [MaskExample("blocks", title, f"{formula}{' and j <= i' if causal else ''}", allowed)]


def _rows(mask: Mask, sizes: MaskSizes, memory_len: int = 0) -> list[Tensor]:
    """Return (length, memory_len + length) bool for each row of the mask."""
    q_len, k_len = sizes.length, memory_len + sizes.length
    allowed = dense_mask(mask, q_len, k_len, torch.device("cpu"), first_query=memory_len)
    assert allowed is not None
    return [row[0].expand(q_len, k_len) for row in allowed]


_MAKERS: dict[str, Callable[[MaskSizes], list[MaskExample]]] = {
    "padding": _padding,
    "causal": _causal,
    "target": _target,
    "window": _window,
    "memory": _memory,
    "blocks": _blocks,
}

MASK_KINDS = tuple(_MAKERS)
"""All kinds, in the order in which they are drawn."""


_MOST_COLUMNS = 4
_MOST_NUMBERED = 16
"""Keys whose cells still hold a number that can be read."""


def masks_figure(masks: Sequence[tuple[str, str, Any, int]], *, title: str = "Masks") -> Figure:
    """Draw one panel per mask: rows are queries, columns are keys; dark cells may be attended to.

    Args: masks: title, formula, (q_len, k_len) of True = may attend, and number of memory columns of each.

    Raises: ShapeError: there is no mask, or one has another rank. MissingExtraError: no matplotlib.
    """
    arrays = [as_array(allowed) for _, _, allowed, _ in masks]
    for array in arrays:
        if array.ndim != 2 or 0 in array.shape:
            raise ShapeError(f"a mask of shape {array.shape}; expected (q_len, k_len).")
    if not arrays:
        raise ShapeError("there is no mask to draw; give at least one.")
    columns = min(_MOST_COLUMNS, len(arrays))
    rows = math.ceil(len(arrays) / columns)
    tall = max(0.55, min(1.0, max(array.shape[0] / array.shape[1] for array in arrays)))
    figure = new_figure(3.7 * columns, (3.0 * tall + 0.9) * rows + 0.4, f"{title}: dark = may be attended to")
    for place, (name, formula, _, num_memory) in enumerate(masks):
        axes = figure.add_subplot(rows, columns, place + 1)
        _draw(axes, arrays[place], num_memory)
        style_axes(axes, grid=False)
        axes.set_title(f"{name}\n{formula}", loc="left", fontsize=9, color=INK)
        axes.set_xlabel("key j" if not num_memory else "key j: memory, then segment", fontsize=8.5, color=MUTED)
        axes.set_ylabel("query i", fontsize=8.5, color=MUTED)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def mask_record(example: MaskExample) -> dict[str, object]:
    """Return an example for JSON."""
    return {
        "kind": example.kind,
        "title": example.title,
        "formula": example.formula,
        "memory": example.num_memory,
        "allowed": example.allowed.int().tolist(),
    }


def mask_text(example: MaskExample) -> str:
    """Return an example as rows of 0 and 1; a bar separates the memory."""
    rows = [[str(value) for value in row] for row in example.allowed.int().tolist()]
    memory = example.num_memory
    lines = [" ".join([*row[:memory], *(["|"] if memory else []), *row[memory:]]) for row in rows]
    return "\n".join([f"{example.title}: {example.formula}", *(f"  {line}" for line in lines)])


def _draw(axes: Axes, allowed: Any, num_memory: int) -> None:
    q_len, k_len = allowed.shape
    axes.imshow(allowed, cmap="Blues", vmin=0.0, vmax=1.25, aspect="equal", interpolation="nearest")
    if max(q_len, k_len) <= _MOST_NUMBERED:
        for (row, column), value in np.ndenumerate(allowed):
            shade = "white" if value else MUTED
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7.5, color=shade)
        axes.set_xticks(range(k_len))
        axes.set_yticks(range(q_len))
        for edge in range(1, max(q_len, k_len)):
            if edge < q_len:
                axes.axhline(edge - 0.5, color="white", linewidth=0.8)
            if edge < k_len:
                axes.axvline(edge - 0.5, color="white", linewidth=0.8)
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    if num_memory:
        axes.axvline(num_memory - 0.5, color=COLOURS[1], linewidth=1.6)


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
            elif getattr(module, "sloped", False):
                penalties = cast("Any", module).penalties().T[:length]
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


Curve = tuple[Sequence[int], Sequence[float]]
"""Steps, and the learning rate at each of them."""
_MOST_POINTS = 2000


def thinned_steps(last: int) -> list[int]:
    """Return the steps 1 to `last`, evenly thinned to what a picture can show."""
    count = min(last, _MOST_POINTS)
    return sorted({1 + point * (last - 1) // max(1, count - 1) for point in range(count)})


def schedule_figure(curves: Mapping[str, Curve], *, title: str = "Learning rate") -> Figure:
    """Draw one curve per schedule.

    Args: curves: name -> the curve.

    Raises: ShapeError: different numbers of steps and rates. MissingExtraError: no matplotlib.
    """
    figure = new_figure(8.5, 4.2)
    axes = figure.subplots()
    for number, (name, (steps, rates)) in enumerate(curves.items()):
        places, array = as_array(steps), as_array(rates)
        if places.shape != array.shape:
            raise ShapeError(f"{name}: {places.shape} steps for {array.shape} rates.")
        axes.plot(places, array, color=COLOURS[number % len(COLOURS)], linewidth=2.0, label=name)
    style_axes(axes, title=title, x_label="step")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    if curves:
        axes.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="best")
    return figure


def rates_of_paper(pairs: Iterable[tuple[int, int]], num_steps: int | None = None) -> dict[str, Curve]:
    """Return the curve of each width and warm-up (Vaswani et al. 2017, sec. 5.3). num_steps: None: 20,000."""
    steps = thinned_steps(num_steps or 20_000)
    return {
        f"width {width}, warm-up {warmup:,}": (
            steps,
            [noam(step, factor=1.0, d_model=width, warmup_steps=warmup) for step in steps],
        )
        for width, warmup in pairs
    }


def rates_of_presets(names: Sequence[str], num_steps: int | None = None) -> dict[str, Curve]:
    """Return the curve of each preset. num_steps: None: the preset's.

    Raises: ConfigError: there is no such preset, or it has no number of steps.
    """
    curves: dict[str, Curve] = {}
    for name in names:
        if name not in PRESETS:
            raise ConfigError(not_among("there is no preset", name, PRESETS))
        config = PRESETS[name]()
        last = num_steps or config.training.max_steps
        if not last:
            raise ConfigError(f"preset {name} has a time limit and no number of steps; give --steps.")
        of_run = {"peak": config.optimiser.learning_rate, "d_model": config.model.d_model}
        steps = thinned_steps(last)
        rates = [learning_rate(config.schedule, **of_run, step=step, progress=step / last) for step in steps]
        curves[name] = (steps, rates)
    return curves
