"""Pictures of segments: what a language model reads, without and with memory, in training and in evaluation.

Paper: Dai et al. 2019, arXiv:1901.02860, figures 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.figure import COLOURS, INK, MUTED, new_figure, style_axes
from manyheads.nn.attention.masks import Causal, dense_mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from manyheads.nn.shapes import Bool


@dataclass(frozen=True, kw_only=True)
class SegmentSizes:
    """The sizes of the examples.

    layers: of attention. segment_len, memory_len: positions of a segment and of the memory in training.
    eval_segment_len, eval_memory_len: the same in evaluation. segments: segments of training that are drawn.
    """

    layers: int = 3
    segment_len: int = 4
    memory_len: int = 4
    eval_segment_len: int = 2
    eval_memory_len: int = 6
    segments: int = 3

    @property
    def length(self) -> int:
        """Positions that are drawn."""
        return self.segment_len * self.segments


@dataclass(frozen=True)
class SegmentExample:
    """An example of segments: the positions that a model reads, up to the last one.

    title, note: what it is, for people. starts: the first position of each segment, or of the window. seen: (length,
    length) bool, the positions below to which each position attends, in every layer; in a window that slides, those of
    its last place. segment_of: number of each position's segment; -1: not read for the last position.
    """

    title: str
    note: str
    starts: tuple[int, ...]
    seen: Bool[Tensor, "length length"]
    segment_of: tuple[int, ...]

    def reach(self, layers: int) -> list[Bool[Tensor, " length"]]:
        """Return which positions the last one depends on, in the output of each layer; the input comes first."""
        last = torch.zeros(len(self.seen), dtype=torch.bool)
        last[-1] = True
        found = [last]
        for _ in range(layers):
            found.append(self.seen[found[-1]].any(dim=0))
        return found[::-1]

    def context(self, layers: int) -> int:
        """Return the number of input positions, of those drawn, that the last output depends on."""
        return int(self.reach(layers)[0].sum())


def segment_examples(sizes: SegmentSizes) -> list[SegmentExample]:
    """Return four examples: without and with memory, each in training and in evaluation.

    >>> [example.context(3) for example in segment_examples(SegmentSizes())]
    [4, 4, 12, 12]
    """
    plain, window = sizes.segment_len, min(sizes.segment_len, sizes.length)
    last = torch.zeros(sizes.length, sizes.length, dtype=torch.bool)
    last[-window:, -window:] = _seen(window, window, 0)
    slid = SegmentExample(
        "evaluation without memory",
        f"the last {window} positions, read anew for each one",
        (sizes.length - window,),
        last,
        (*[-1] * (sizes.length - window), *[0] * window),
    )
    return [
        _in_segments("training without memory", "segments know nothing of each other", sizes.length, plain, 0),
        slid,
        _in_segments(
            f"training with a memory of {sizes.memory_len}",
            "each layer also reads stored inputs, without gradient",
            sizes.length,
            plain,
            sizes.memory_len,
        ),
        _in_segments(
            f"evaluation with a memory of {sizes.eval_memory_len}",
            "nothing is computed twice",
            sizes.length,
            sizes.eval_segment_len,
            sizes.eval_memory_len,
        ),
    ]


def _seen(length: int, segment_len: int, memory_len: int) -> Tensor:
    """Return (length, length): which positions each one attends to, with the masks of the models."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for start in range(0, length, segment_len):
        stop, memory = min(start + segment_len, length), min(memory_len, start)
        allowed = cast(Tensor, dense_mask(Causal(), stop - start, memory + stop - start, torch.device("cpu"), memory))
        seen[start:stop, start - memory : stop] = allowed[0, 0]
    return seen


def _in_segments(title: str, note: str, length: int, segment_len: int, memory_len: int) -> SegmentExample:
    starts = tuple(range(0, length, segment_len))
    numbers = tuple(position // segment_len for position in range(length))
    return SegmentExample(title, note, starts, _seen(length, segment_len, memory_len), numbers)


def segment_text(example: SegmentExample, layers: int) -> str:
    """Return an example as a line, and one row for each layer, the last first: `#` is read for the last output."""
    rows = []
    for layer, read in reversed(list(enumerate(example.reach(layers)))):
        marks = []
        for position, is_read in enumerate(read.tolist()):
            bar = "|" if position in example.starts and position else ""
            marks.append(f"{bar}{'#' if is_read else '.'}")
        rows.append(f"  {f'layer {layer}' if layer else 'input':<9}{''.join(marks)}")
    count = f"{example.context(layers)} of {len(example.seen)} positions"
    return "\n".join([f"{example.title}: the last output depends on {count}; {example.note}", *rows])


def segment_record(example: SegmentExample, layers: int) -> dict[str, object]:
    """Return an example for JSON."""
    return {
        "title": example.title,
        "note": example.note,
        "starts": list(example.starts),
        "context": example.context(layers),
        "seen": example.seen.int().tolist(),
        "reach": [read.int().tolist() for read in example.reach(layers)],
    }


def segments_figure(examples: Sequence[SegmentExample], layers: int) -> Figure:
    """Draw one panel per example: positions from left to right, layers from bottom to top.

    Lines show what each position reads below it; strong ones belong to the last output, in the second colour where they
    come from memory.
    Raises: ShapeError: there is no example. MissingExtraError: no matplotlib.
    """
    if not examples:
        raise ShapeError("there are no segments to draw; give at least one example.")
    length, rows = len(examples[0].seen), (len(examples) + 1) // 2
    width, height = min(16.0, max(9.0, 0.8 * length)), (0.75 * layers + 1.6) * rows + 0.4
    figure = new_figure(width, height, "Segments: what the last output depends on")
    for place, example in enumerate(examples):
        _draw(figure.add_subplot(rows, min(2, len(examples)), place + 1), example, layers)
    return figure


_IDLE = "#d5dae0"
"""Colour of what the last output does not depend on."""


def _draw(axes: Axes, example: SegmentExample, layers: int) -> None:
    from matplotlib.collections import LineCollection

    length, reach = len(example.seen), example.reach(layers)
    lines: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {_IDLE: [], COLOURS[0]: [], COLOURS[1]: []}
    for query, key in example.seen.nonzero().tolist():
        own = COLOURS[int(example.segment_of[query] != example.segment_of[key])]
        for layer in range(layers):
            lines[own if reach[layer + 1][query] else _IDLE].append(((key, layer), (query, layer + 1)))
    for colour, some in lines.items():
        axes.add_collection(LineCollection(some, colors=colour, linewidths=0.6 if colour == _IDLE else 1.3))
    for layer, read in enumerate(reach):
        colours = [
            COLOURS[0] if is_read else ("white" if number < 0 else "#eef1f4")
            for is_read, number in zip(read.tolist(), example.segment_of, strict=True)
        ]
        axes.scatter(range(length), [layer] * length, c=colours, edgecolors=MUTED, s=42, linewidths=0.8, zorder=3)
    for start in example.starts:
        if start:
            axes.axvline(start - 0.5, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
    style_axes(axes, x_label="position", grid=False)
    title = f"{example.title}: {example.context(layers)} of {length} positions\n{example.note}"
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.set_yticks(range(layers + 1), ["input", *(f"layer {layer}" for layer in range(1, layers + 1))])
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.set_ylim(-0.4, layers + 0.4)
