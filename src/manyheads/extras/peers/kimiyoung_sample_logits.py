"""The sampled softmax of the original Transformer-XL (kimiyoung/transformer-xl, utils/log_uniform_sampler.py).

Differs from ours (`nn.heads.sampled`): the probability of being drawn uses log1p(p) instead of -log1p(-p), so it is
too low for 2 n_sample draws with replacement; it is also subtracted from the target's logit; and a candidate that
equals the target stays in the sum with a logit of -1e30.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.extras.peers.layout import Layout
from manyheads.extras.peers.peer import Options, Peer, require
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.heads.sampled import LogUniformCandidates

__all__ = ["SampleLogits"]

_HIT = -1e30


class SampleLogits(Peer):
    """An embedding, a bias and a sampler. in.hidden (T, B, d), in.labels (T, B), in.neg_samples: the ids that the peer
    drew.
    """

    name = "sample_logits"
    kinds = ("txl_sample_logits",)
    origin = "kimiyoung/transformer-xl pytorch/utils/log_uniform_sampler"
    section = None
    ignores_others = True
    options: ClassVar[Options] = {"vocab": int, "d": int, "n_sample": int}
    layout: ClassVar[Layout] = {"emb.weight": "weight", "bias": "bias"}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LinearHead:
        if min(options.values()) < 1:
            raise ConfigError(f"vocab, d and n_sample must be whole numbers above 0; they are {options}.")
        return LinearHead(options["d"], options["vocab"], bias=True)

    @classmethod
    def describe(cls, module: LinearHead) -> dict[str, Any]:
        """See `Peer.describe`; without n_sample, which is not a property of the weights."""
        cls.refuse({"a head without a bias": module.bias is None})
        return {"vocab": module.weight.shape[0], "d": module.weight.shape[1]}

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden, labels, drawn = require(inputs, "hidden", "labels", "neg_samples")
        table, bias = self.module.weight, self.module.bias
        assert bias is not None
        dist = LogUniformCandidates(table.shape[0], 1).probabilities
        log_q = torch.log(-torch.expm1(-2 * self.chosen["n_sample"] * torch.log1p(dist)))
        log_q, dist = log_q.to(table.dtype), dist.to(table.dtype)
        true = (hidden * F.embedding(labels, table)).sum(-1) + bias[labels] - log_q[labels]
        others = hidden @ table[drawn].t() + bias[drawn] - log_q[drawn]
        others = others.masked_fill(labels[..., None] == drawn, _HIT)
        logits = torch.cat([true[..., None], others], dim=-1)
        return {
            "out.dist": dist,
            "out.log_q": log_q,
            "out.logits": logits,
            "out.loss": -torch.log_softmax(logits, dim=-1)[..., 0],
        }
