"""The token embeddings of a model as vectors: their nearest neighbours, and a map of some of them.

The vectors are those that a token gives to the model: of a Transformer-XL with adaptive widths, after the projection to
d_model. They are read some rows at a time, so no table of all pairs of tokens is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyheads.errors import ModelFileError
from manyheads.nn.embedding import TokenEmbedding
from manyheads.nn.heads.adaptive import AdaptiveEmbedding
from manyheads.nn.shapes import Float

__all__ = ["EmbeddingTable", "Neighbour", "embedding_tables", "nearest", "principal_plane"]

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
