"""The sampled softmax of the original Transformer-XL (kimiyoung/transformer-xl, utils/log_uniform_sampler.py).

Differs from ours (`nn.heads.sampled`): the probability of being drawn uses log1p(p) instead of -log1p(-p), so it is
too low for 2 n_sample draws with replacement; it is also subtracted from the target's logit; and a candidate that
equals the target stays in the sum with a logit of -1e30.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.interop.names import Pair, export_weights, import_weights, pick, require
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.heads.sampled import LogUniformCandidates

__all__ = ["SampleLogits", "from_peer", "matches", "to_peer"]

_PAIRS = [Pair("emb.weight", ("weight",)), Pair("bias", ("bias",))]
_HIT = -1e30


class SampleLogits:
    """An embedding, a bias and a sampler; see `protocols.Wrapper`. num_samples: the peer's n_sample."""

    def __init__(self, module: LinearHead, num_samples: int) -> None:
        self.module = module
        self.num_samples = num_samples

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`. in.hidden (T, B, d), in.labels (T, B), in.neg_samples: the ids that the peer
        drew.
        """
        hidden, labels = require(inputs, "in.hidden"), require(inputs, "in.labels")
        drawn = require(inputs, "in.neg_samples")
        table, bias = self.module.weight, self.module.bias
        assert bias is not None
        dist = LogUniformCandidates(table.shape[0], 1).probabilities
        log_q = torch.log(-torch.expm1(-2 * self.num_samples * torch.log1p(dist)))
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


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    if "kind" in meta:
        return bool(meta["kind"] == "txl_sample_logits")
    return str(meta.get("peer", "")).startswith("kimiyoung/transformer-xl pytorch/utils/log_uniform_sampler")


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> SampleLogits:
    """See `protocols.Loader.from_peer`. config: vocab, d and n_sample."""
    names = ("vocab", "d", "n_sample")
    sizes = pick({name: config.get(name, ...) for name in names}, dict.fromkeys(names, ...), "sample_logits")
    if any(type(size) is not int or size < 1 for size in sizes.values()):
        raise ConfigError(f"vocab, d and n_sample must be whole numbers above 0; they are {sizes}.")
    module = LinearHead(sizes["d"], sizes["vocab"], bias=True)
    import_weights(module, state_dict, _PAIRS)
    return SampleLogits(module.eval(), sizes["n_sample"])


def to_peer(module: LinearHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer`, except for n_sample, which is not a property of the weights.

    Raises: ConfigError: the head has no bias.
    """
    if module.bias is None:
        raise ConfigError("sample_logits adds a bias; this head has none.")
    sizes = {"vocab": module.weight.shape[0], "d": module.weight.shape[1]}
    return sizes, export_weights(module.state_dict(), _PAIRS)
