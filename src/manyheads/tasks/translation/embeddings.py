"""The first weights of a translator that depend on its data: embeddings from counts, which the decoder can read."""

from __future__ import annotations

import torch
from torch import nn

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.data.cooccurrence import cooccurrence_embeddings
from manyheads.data.store import PairStore
from manyheads.distributed.group import Group
from manyheads.nn.attention.multi_head import MultiHeadAttention

__all__ = ["begin_embeddings"]


@torch.no_grad()
def begin_embeddings(model: Seq2Seq, pairs: PairStore, seed: int, group: Group) -> None:
    """Give the tables of sources, targets and output the vectors of `cooccurrence_embeddings`, turned randomly.

    They have length 1, as random vectors of N(0, 1 / d_model) have on average. Turned, no direction of theirs belongs
    to certain positions or heads. Ids that say nothing keep their random vectors.

    The decoder's attention to the source begins with an orthogonal W_V and W_O = W_V^T. So it adds the mean of what it
    reads to the stream, and the output layer finds words that are near the words of the source.

    Args:
        model: whole, on a CPU, with its random weights.
        pairs: of the training.
        seed: of the turn, and of W_V.
        group: the ranks, all of which get the vectors that the main one computes.
    """
    width = model.config.d_model
    chance = torch.Generator().manual_seed(seed)
    turn = nn.init.orthogonal_(torch.empty(width, width), generator=chance)
    table = group.joined(cooccurrence_embeddings(pairs, width) @ turn if group.is_main else None, rows=pairs.vocab_size)
    tables = (model.body.source_embedding.weight, model.body.target_embedding.weight, model.head.weight)
    for weight in {id(one): one for one in tables}.values():
        new = table[: len(weight)].to(weight)
        old = weight[: len(new)]
        old.copy_(torch.where(new.any(1, keepdim=True), new, old))
    for name, module in model.named_modules():
        if name.endswith("cross_attn") and isinstance(module, MultiHeadAttention):
            nn.init.orthogonal_(module.v_proj.weight, generator=chance)
            module.out_proj.weight.copy_(module.v_proj.weight.mT)
