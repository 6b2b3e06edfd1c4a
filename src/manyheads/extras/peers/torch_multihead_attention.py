"""torch.nn.MultiheadAttention: one matrix for queries, keys and values, blocking or additive masks, extra keys.

Its weights become a `MultiHeadAttention`; with `add_bias_kv` or `add_zero_attn`, which ours does not have, a
`TorchMultiheadAttention`. A query that may attend to nothing is NaN there and zeros here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyheads.extras.peers.layout import Layout
from manyheads.extras.peers.peer import Options, Peer, own_heads, require
from manyheads.nn.attention.multi_head import PROJECTIONS, MultiHeadAttention
from manyheads.nn.attention.torch_compatible import TorchMultiheadAttention, mask_of_torch

__all__ = ["TorchAttention"]


class TorchAttention(Peer):
    """out.out, and out.weights (batch, heads, q_len, k_len)."""

    name = "torch.nn.MultiheadAttention"
    kinds = ("torch_nn_mha",)
    origin = r"torch\.nn\.MultiheadAttention( |$)"
    options: ClassVar[Options] = {
        "embed_dim": int,
        "num_heads": int,
        "dropout": 0.0,
        "bias": True,
        "add_bias_kv": False,
        "add_zero_attn": False,
        "kdim": int | None,
        "vdim": int | None,
        "batch_first": False,
    }
    inputs = ("query", "key", "value", "key_padding_mask", "attn_mask")

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
        if options["add_bias_kv"] or options["add_zero_attn"]:
            return TorchMultiheadAttention(**options)
        return MultiHeadAttention(
            options["embed_dim"],
            options["num_heads"],
            key_dim=options["kdim"],
            value_dim=options["vdim"] or options["embed_dim"],
            dropout=options["dropout"],
            bias=options["bias"],
        )

    @classmethod
    def layout_of(cls, module: Any) -> Layout:
        if isinstance(module, TorchMultiheadAttention):
            return {"*": "*", "out_proj.*": "out_proj.*"}
        one_width = {getattr(module, name).in_features for name in PROJECTIONS[:3]} == {module.out_proj.out_features}
        return {
            **(
                {"in_proj_weight": "{q,k,v}_proj.weight"}
                if one_width
                else {"{q,k,v}_proj_weight": "{q,k,v}_proj.weight"}
            ),
            "in_proj_bias": "{q,k,v}_proj.bias",
            "out_proj.*": "out_proj.*",
        }

    @classmethod
    def describe(cls, module: Any) -> dict[str, Any]:
        if isinstance(module, TorchMultiheadAttention):
            names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
            options = {name: getattr(module, name) for name in names}
            return {**options, "bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
        embed_dim = module.out_proj.out_features
        biases = {getattr(module, name).bias is not None for name in PROJECTIONS}
        cls.refuse(
            {
                **own_heads(module),
                f"query_dim {module.q_proj.in_features}": module.q_proj.in_features != embed_dim,
                "biases in some projections only": len(biases) > 1,
            }
        )
        return {
            "embed_dim": embed_dim,
            "num_heads": module.num_heads,
            "dropout": module.dropout_rate,
            "bias": biases == {True},
            "kdim": module.k_proj.in_features,
            "vdim": module.v_proj.in_features,
            "batch_first": True,
        }

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        query, key, value = require(inputs, "query", "key", "value")
        padding, pattern = inputs.get("in.key_padding_mask"), inputs.get("in.attn_mask")
        if isinstance(self.module, TorchMultiheadAttention):
            out, weights = self.module(query, key, value, padding, True, pattern, average_attn_weights=False)
            return {"out.out": out, "out.weights": weights}
        batched, batch_first = query.dim() == 3, self.chosen["batch_first"]
        if not batched:
            query, key, value = query[None], key[None], value[None]
            padding = None if padding is None else padding[None]
        elif not batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        sizes = (query.shape[0], self.module.num_heads, query.shape[1], key.shape[1])
        mask = mask_of_torch(pattern, padding, *sizes)
        out, _, weights = self.module(query, key, value, mask=mask, need_weights=True)
        if not batched:
            return {"out.out": out[0], "out.weights": weights[0]}
        return {"out.out": out if batch_first else out.transpose(0, 1).contiguous(), "out.weights": weights}
