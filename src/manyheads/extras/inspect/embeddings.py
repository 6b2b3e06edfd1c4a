"""The token embeddings of a model as vectors: their nearest neighbours, and a map of some of them.

The vectors are those that a token gives to the model: of a Transformer-XL with adaptive widths, after the projection to
d_model. They are read some rows at a time, so no table of all pairs of tokens is made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.catalogue import ARCHITECTURES
from manyheads.config.checks import not_among
from manyheads.errors import ModelFileError, RequestError, ShapeError
from manyheads.extras.classification.classifier import Classifier
from manyheads.extras.inspect.attending import legible, open_model
from manyheads.extras.inspect.drawings.attention import shown_token
from manyheads.extras.inspect.drawings.figure import (
    COLOURS,
    INK,
    MUTED,
    legible_texts,
    new_figure,
    plain_text,
    style_axes,
)
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import read_config
from manyheads.nn.heads.adaptive import AdaptiveEmbedding
from manyheads.nn.positions import TokenEmbedding
from manyheads.text.pipeline import SPACE_SIGN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from manyheads.nn.shapes import Float


_NUMBERS_AT_ONCE = 1 << 22
"""Numbers of the vocabulary's vectors that are in memory at once, in float64: 32 MiB."""


class Neighbour(NamedTuple):
    """A token near another one. cosine: of the angle between their vectors."""

    id: int
    cosine: float


@dataclass(frozen=True)
class EmbeddingTable:
    """The vectors of one vocabulary.

    sides: what reads it: `source`, `target`, both if they share one matrix, or `tokens`. num_rows: its ids.
    """

    sides: tuple[str, ...]
    module: nn.Module
    num_rows: int
    width: int

    def vectors(self, ids: Sequence[int] | range) -> Float[Tensor, "ids width"]:
        """Return the vectors of these ids in float64, on the CPU.

        Raises: ModelFileError: a number is infinite or NaN.
        """
        rows = torch.as_tensor(list(ids), dtype=torch.int64, device=next(self.module.parameters()).device)
        with torch.no_grad():
            found: Tensor = self.module(rows[None])[0].to("cpu", torch.float64)
        finite = found.isfinite().all(dim=1)
        if not finite.all():
            wrong = list(ids)[int(finite.logical_not().nonzero()[0])]
            raise ModelFileError(
                f"the embedding of id {wrong} has infinite or undefined numbers; the model is damaged or diverged in"
                " training. Load an earlier checkpoint."
            )
        return found


def embedding_tables(model: nn.Module) -> list[EmbeddingTable]:
    """Return the tables of token embeddings, in the order of the model; sides with one matrix are one table."""
    found: list[EmbeddingTable] = []
    seen: dict[int, int] = {}
    for path, module in model.named_modules():
        if not isinstance(module, TokenEmbedding | AdaptiveEmbedding):
            continue
        side = path.rpartition(".")[2].removesuffix("embedding").rstrip("_") or "tokens"
        first = module.token_table
        if id(first) in seen:
            old = found[seen[id(first)]]
            found[seen[id(first)]] = EmbeddingTable((*old.sides, side), old.module, old.num_rows, old.width)
            continue
        if isinstance(module, TokenEmbedding):
            rows, width = module.num_embeddings, module.embedding_dim
        else:
            rows = sum(module.clusters.sizes)
            width = first.shape[1] if module.projections is None else module.projections[0].shape[0]
        seen[id(first)] = len(found)
        found.append(EmbeddingTable((side,), module, rows, width))
    return found


def nearest(
    table: EmbeddingTable,
    queries: Float[Tensor, "queries width"],
    count: int,
    *,
    num_rows: int | None = None,
    without: Sequence[Sequence[int]] = (),
) -> list[list[Neighbour]]:
    """Return the `count` tokens with the highest cosine for each query, the nearest first, equal ones by id.

    Args:
        queries: in float64.
        num_rows: only ids below it; None: all.
        without: for each query, ids that are left out, such as its own; empty: none.

    A vector of zeros has the cosine 0 with every other. Fewer are returned if the vocabulary has fewer.
    Raises: ModelFileError: see `EmbeddingTable.vectors`.
    Cost: time in (queries x vocabulary x width); memory for some rows only.
    """
    rows = table.num_rows if num_rows is None else min(num_rows, table.num_rows)
    directions = _unit(queries)
    best = directions.new_empty(len(queries), 0)
    best_ids = torch.empty(len(queries), 0, dtype=torch.int64)
    step = max(1, min(_NUMBERS_AT_ONCE // table.width, rows))
    for first in range(0, rows, step):
        ids = torch.arange(first, min(first + step, rows))
        cosines = directions @ _unit(table.vectors(range(first, first + len(ids)))).T  # (queries, ids)
        for query, left_out in enumerate(without):
            for one in left_out:
                if first <= one < first + len(ids):
                    cosines[query, one - first] = -torch.inf
        best = torch.cat([best, cosines], dim=1)
        best_ids = torch.cat([best_ids, ids.expand(len(queries), -1)], dim=1)
        # Stable, so that of equal tokens the one with the smaller id comes first.
        best, order = best.sort(dim=1, descending=True, stable=True)
        best, best_ids = best[:, :count], best_ids.gather(1, order[:, :count])
    return [
        [Neighbour(index, value) for index, value in zip(some.tolist(), values.tolist(), strict=True) if value >= -2.0]
        for some, values in zip(best_ids, best, strict=True)
    ]


def principal_plane(vectors: Float[Tensor, "points width"]) -> tuple[Float[Tensor, "points 2"], tuple[float, float]]:
    """Return the points in the plane of their first two principal components, and each one's share of the variance.

    A component's sign is arbitrary; here its largest coefficient is positive, so that a model has one map. Components
    that do not exist, of points on a line, are zero.
    """
    centred = vectors.double() - vectors.double().mean(dim=0)
    _, lengths, components = torch.linalg.svd(centred, full_matrices=False)
    components, lengths = components[:2], lengths.square()
    peaks = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    plane = centred @ (components * torch.where(peaks < 0, -1.0, 1.0)).T
    plane = torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
    total = float(lengths.sum())
    shares = [float(one) / total if total > 0 else 0.0 for one in lengths[:2]]
    return plane, (shares[0], shares[1] if len(shares) > 1 else 0.0)


def _unit(vectors: Tensor) -> Tensor:
    """Return the vectors with length 1; zeros stay zeros."""
    lengths = vectors.norm(dim=-1, keepdim=True)
    return vectors / torch.where(lengths > 0, lengths, 1.0)


_SPECIAL = re.compile(r"<[^<>\s]+>|>>[^<>\s]+<<")
"""Special tokens, bytes and tags of languages."""
_LEAST_LETTERS = 2


@dataclass(frozen=True)
class NamedEmbeddings:
    """A table of embeddings with its vocabulary. vocabulary: has `encode`, `tokens` and `vocab_size`."""

    table: EmbeddingTable
    vocabulary: Any

    @property
    def name(self) -> str:
        """The sides that use the table, such as `source and target`."""
        return " and ".join(self.table.sides)

    @property
    def num_rows(self) -> int:
        """Ids that the vocabulary can name."""
        return min(self.table.num_rows, int(self.vocabulary.vocab_size))

    def label(self, index: int) -> str:
        """Return a token as people read it."""
        return legible(self.vocabulary.tokens([index]))[0]

    def labels(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as the map shows them.

        If pieces mark the beginning of a word, `▁walk` is shown as `walk` and `ing` as `-ing`.
        """
        tokens = [self.label(index) for index in ids]
        if not self._word_ids:
            return tokens
        return [
            token[1:] if token[0] == SPACE_SIGN and token[1:] else f"-{token}" if token[0].isalpha() else token
            for token in tokens
        ]

    @cached_property
    def _tokens(self) -> list[str]:
        tokens: list[str] = self.vocabulary.tokens(range(self.num_rows))
        return tokens

    @cached_property
    def _word_ids(self) -> list[int]:
        """Ids of pieces that are whole words of two letters or more."""
        return [
            index
            for index, token in enumerate(self._tokens)
            if token.startswith(SPACE_SIGN) and len(token) > _LEAST_LETTERS and token[1:].isalpha()
        ]

    def frequent(self, count: int) -> list[int]:
        """Return the first ids that are whole words; if these are too few, of all tokens but special ones and bytes.

        Ids increase with decreasing frequency, or in the order in which pieces were learned, frequent ones first.
        """
        if len(self._word_ids) >= count:
            return self._word_ids[:count]
        return [index for index, token in enumerate(self._tokens) if not _SPECIAL.fullmatch(token)][:count]

    def word(self, text: str) -> EmbeddedWord:
        """Return a word with the mean of the vectors of its pieces.

        Raises: RequestError: the vocabulary does not know the word, or it has no piece. DataError: it is not text.
        """
        ids = self.vocabulary.encode(text)
        if not ids:
            raise RequestError(f"--words {text!r} has no token; give a word.")
        if getattr(self.vocabulary, "unk_id", None) in ids:
            raise RequestError(f"--words {text!r}: the vocabulary does not know this word; give one that it has.")
        return self._embedded(text, ids)

    def token(self, index: int) -> EmbeddedWord:
        """Return the token with this id. Raises: RequestError: the vocabulary has no such id."""
        if not 0 <= index < self.num_rows:
            raise RequestError(f"--ids {index}: the vocabulary has the ids 0 to {self.num_rows - 1:,}.")
        return self._embedded(self.label(index), [index])

    def _embedded(self, text: str, ids: list[int]) -> EmbeddedWord:
        pieces = tuple(legible(self.vocabulary.tokens(ids)))
        return EmbeddedWord(text, pieces, tuple(ids), self.table.vectors(ids).mean(dim=0))


@dataclass(frozen=True)
class EmbeddedWord:
    """A word, its tokens, and the mean of their vectors. Shape: vector (width,), float64."""

    text: str
    pieces: tuple[str, ...]
    ids: tuple[int, ...]
    vector: Tensor


@dataclass(frozen=True)
class MapPoint:
    """A point of the map. kind: `word` that was asked for, `neighbour` of one, or `frequent` token."""

    token: str
    kind: str
    x: float
    y: float


def open_embeddings(path: str | Path, side: str | None = None) -> NamedEmbeddings:
    """Load a table of embeddings with its vocabulary, on the CPU in fp32.

    Args: side: `source` or `target` of a translator; None: the first one.

    Raises: RequestError: the model has no such side. ModelFileError: it has no table. As `open_model`.
    """
    task = ARCHITECTURES[read_config(resolve_model_path(path)).architecture].task
    reader: Any = Classifier.from_pretrained(path, "cpu") if task == "classification" else open_model(path, "cpu")
    tables = embedding_tables(reader.model) if isinstance(reader.model, torch.nn.Module) else []
    sides = [name for table in tables for name in table.sides]
    if not sides:
        raise ModelFileError(f"{path} has no table of token embeddings.")
    if side is not None and side not in sides:
        raise RequestError(f"--side {side}: {not_among('the model has no embedding', side, sides)}")
    side = side or sides[0]
    table = next(one for one in tables if side in one.sides)
    if task == "language-modelling":
        return NamedEmbeddings(table, reader.vocabulary)
    return NamedEmbeddings(table, getattr(reader.tokenizer, side) if task == "translation" else reader.tokenizer)


def neighbours_of(embeddings: NamedEmbeddings, words: Sequence[EmbeddedWord], count: int) -> list[list[Neighbour]]:
    """Return the nearest tokens of each word, without its own."""
    if not words:
        return []
    return nearest(
        embeddings.table,
        torch.stack([word.vector for word in words]),
        count,
        num_rows=embeddings.num_rows,
        without=[word.ids for word in words],
    )


def embedding_map(
    embeddings: NamedEmbeddings, words: Sequence[EmbeddedWord], found: Sequence[Sequence[Neighbour]], frequent: int
) -> tuple[list[MapPoint], tuple[float, float]]:
    """Return words, their neighbours and frequent tokens in the plane of their first two principal components.

    Args:
        found: the neighbours of the words.
        frequent: number of frequent tokens: see `NamedEmbeddings.frequent`.

    Returns: the points, and the share of the variance of each axis. Raises: RequestError: there is nothing to draw.
    """
    shown = {index for word in words if len(word.ids) == 1 for index in word.ids}
    near = [index for index in dict.fromkeys(one.id for some in found for one in some) if index not in shown]
    shown |= set(near)
    others = [index for index in embeddings.frequent(frequent) if index not in shown]
    if not (words or others):
        raise RequestError("there is no token to draw; give --words, or --tokens above 0.")
    vectors = torch.cat([*(word.vector[None] for word in words), embeddings.table.vectors([*near, *others])])
    plane, shares = principal_plane(vectors)
    labels = [word.text for word in words] + embeddings.labels([*near, *others])
    kinds = ["word"] * len(words) + ["neighbour"] * len(near) + ["frequent"] * len(others)
    points = [MapPoint(label, kind, x, y) for label, kind, (x, y) in zip(labels, kinds, plane.tolist(), strict=True)]
    return points, shares


_MOST_LETTERS = 18
_KINDS = {
    # kind -> colour, size of the point, size of the label, what it is
    "word": (COLOURS[1], 34.0, 10.0, "asked for"),
    "neighbour": (COLOURS[0], 20.0, 8.5, "a nearest neighbour"),
    "frequent": (MUTED, 9.0, 8.0, "a frequent token"),
}
_PLACES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Positions of a label relative to its point, the best first."""
_DISTANCES = (5.0, 9.0)
"""Points from the centre of a point to its label."""


class Point(Protocol):
    """See `extras.inspect.embeddings.MapPoint`."""

    @property
    def token(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def x(self) -> float: ...
    @property
    def y(self) -> float: ...


def embedding_map_figure(points: Sequence[Point], shares: tuple[float, float], *, title: str) -> Figure:
    """Draw the points with their labels. A label that has no space is left out; requested words get theirs first.

    Args:
        points: in the order in which labels are placed within a kind.
        shares: of the variance on the two axes.

    Raises: ShapeError: there is no point. MissingExtraError: no matplotlib.
    """
    if not points:
        raise ShapeError("there is no point to draw.")
    figure = new_figure(9.5, 7.4, title)
    axes = figure.subplots()
    for order, (kind, (colour, size, _, what)) in enumerate(_KINDS.items()):
        own = [point for point in points if point.kind == kind]
        if own:
            axes.scatter(
                [point.x for point in own],
                [point.y for point in own],
                s=size,
                color=colour,
                alpha=0.9,
                linewidth=0,
                zorder=3 - 0.1 * order,
                label=what,
            )
    axes.margins(0.08)
    style_axes(
        axes,
        x_label=f"first principal component, {shares[0]:.0%} of the variance",
        y_label=f"second, {shares[1]:.0%}",
    )
    if len({point.kind for point in points}) > 1:
        axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, -0.07), ncols=3)
    # The note's space is kept before labels are placed; otherwise the points would move below their labels.
    note = axes.set_title(" ", loc="right", fontsize=8, color=MUTED)
    left_out = _label(figure, axes, points)
    if left_out:
        note.set_text(f"{left_out} of {len(points)} labels have no space and are left out")
    return figure


def _label(figure: Figure, axes: Axes, points: Sequence[Point]) -> int:
    """Place the labels. Returns: the number of labels without space."""
    order = sorted(range(len(points)), key=lambda place: list(_KINDS).index(points[place].kind))
    shown, families = legible_texts([_shortened(points[place].token) for place in order])
    figure.draw_without_rendering()  # the layout is needed to know where points are
    renderer: Any = figure._get_renderer()  # type: ignore[attr-defined]
    scale = figure.dpi / 72
    centres = axes.transData.transform([(point.x, point.y) for point in points])
    frame = axes.get_window_extent(renderer)
    radii = np.array([_KINDS[point.kind][1] ** 0.5 / 2 * scale for point in points])
    taken = np.stack([centres[:, 0] - radii, centres[:, 1] - radii, centres[:, 0] + radii, centres[:, 1] + radii], 1)
    left_out = 0
    for place, label in zip(order, shown, strict=True):
        colour, _, size, _ = _KINDS[points[place].kind]
        bold = "bold" if points[place].kind == "word" else "normal"
        text = axes.annotate(
            label,
            (points[place].x, points[place].y),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=size,
            fontfamily=families,
            fontweight=bold,
            color=colour if points[place].kind == "word" else INK,
        )
        plain_text([text])
        text.set_in_layout(False)
        box = text.get_window_extent(renderer)
        free = _free_place(centres[place], box.width, box.height, taken, frame, scale)
        if free is None:
            text.remove()
            left_out += 1
            continue
        offset, corners = free
        text.set_horizontalalignment("left")
        text.set_verticalalignment("bottom")
        text.set_position(offset)
        between = np.array([-2.0, 0, 2, 0]) * scale  # so that two words beside each other are not read as one
        taken = np.concatenate([taken, (corners + between)[None]])
    return left_out


def _free_place(
    centre: Any, width: float, height: float, taken: Any, frame: Any, scale: float
) -> tuple[tuple[float, float], Any] | None:
    """Return the first free place of a label: its offset from the point, in points, and its corners in pixels."""
    for distance in _DISTANCES:
        for across, up in _PLACES:
            gap = distance * scale * (0.75 if across and up else 1.0)
            left = centre[0] + across * gap + (across - 1) / 2 * width
            below = centre[1] + up * gap + (up - 1) / 2 * height
            corners = np.array([left, below, left + width, below + height])
            inside = frame.x0 <= left and left + width <= frame.x1 and frame.y0 <= below and below + height <= frame.y1
            hit = (
                (taken[:, 0] < corners[2])
                & (taken[:, 2] > corners[0])
                & (taken[:, 1] < corners[3])
                & (taken[:, 3] > corners[1])
            )
            if inside and not hit.any():
                return ((left - centre[0]) / scale, (below - centre[1]) / scale), corners
    return None


def _shortened(token: str) -> str:
    shown = shown_token(token)
    return shown if len(shown) <= _MOST_LETTERS else f"{shown[: _MOST_LETTERS - 1]}…"
