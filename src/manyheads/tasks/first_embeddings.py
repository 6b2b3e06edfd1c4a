"""The first embeddings of a model, learned from counts: `initial.embeddings`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from manyheads.distributed.group import Group


@torch.no_grad()
def begin_embeddings(
    tables: Iterable[Tensor], rows: int, learn: Callable[[int], Tensor], seed: int, group: Group
) -> None:
    """Give tables the vectors that `learn` finds, turned randomly.

    They have length 1, as random vectors of N(0, 1 / width) have on average. The rotation prevents that a direction of
    the vectors belongs to certain positions or heads. Ids without information keep their random vectors.

    Args:
        tables: of embeddings and outputs, (ids, width), on a CPU; all have one width. One that occurs twice is written
            once.
        rows: the number of ids.
        learn: see `data.cooccurrence`; given the width, it returns (rows, width).
        seed: of the turn.
        group: the ranks, all of which get the vectors that the main one computes.
    """
    distinct = list({id(one): one for one in tables}.values())
    table = None
    if group.is_main:
        width = distinct[0].shape[1]
        normal = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
        table = learn(width) @ torch.linalg.qr(normal)[0]
    table = group.joined(table, rows=rows)
    for weight in distinct:
        new = table[: len(weight)].to(weight)
        old = weight[: len(new)]
        old.copy_(torch.where(new.any(1, keepdim=True), new, old))
