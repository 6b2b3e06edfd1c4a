"""The first embeddings of a translator, learned from counts."""

from __future__ import annotations

import torch

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.data.cooccurrence import cooccurrence_embeddings
from manyheads.data.store import PairStore
from manyheads.distributed.group import Group

__all__ = ["begin_embeddings"]


@torch.no_grad()
def begin_embeddings(model: Seq2Seq, pairs: PairStore, seed: int, group: Group) -> None:
    """Give the tables of sources, targets and output the vectors of `cooccurrence_embeddings`, turned randomly.

    They have length 1, as random vectors of N(0, 1 / d_model) have on average. Turned, no direction of theirs belongs
    to certain positions or heads. Ids that say nothing keep their random vectors.

    Args:
        model: whole, on a CPU, with its random weights.
        pairs: of the training.
        seed: of the turn.
        group: the ranks, all of which get the vectors that the main one computes.
    """
    table = None
    if group.is_main:
        width = model.config.d_model
        normal = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
        table = cooccurrence_embeddings(pairs, width) @ torch.linalg.qr(normal)[0]
    table = group.joined(table, rows=pairs.vocab_size)
    tables = (model.body.source_embedding.weight, model.body.target_embedding.weight, model.head.weight)
    for weight in {id(one): one for one in tables}.values():
        new = table[: len(weight)].to(weight)
        old = weight[: len(new)]
        old.copy_(torch.where(new.any(1, keepdim=True), new, old))
