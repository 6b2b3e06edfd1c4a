"""The multi-head attention of a widely copied tutorial: one projection for queries, keys and values, head by head.

Differs from ours: rows of qkv_proj are those of head 0's query, key and value, then head 1's, and so on; masks say
0 = blocked, broadcast to (batch, heads, q_len, k_len), and fill with -9e15, so that a query that may attend to nothing
attends to all keys equally; its forward only runs where input_dim is embed_dim, ours always.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.errors import RequestError
from manyheads.extras.peers.one_head import DotProductAttention
from manyheads.extras.peers.peer import (
    Layout,
    Options,
    Peer,
    Rule,
    own_heads,
    read_options,
    require,
    uniform_when_empty,
)
from manyheads.nn.attention.multi_head import PROJECTIONS, MultiHeadAttention


class FusedQkv(Peer):
    """out.out_* and out.attn_* for in.x without a mask and with each in.mask_*, and scaled_dot_product for in.q, in.k,
    in.v if they are given. A config holds the constructor's arguments under `model`, or `d` and `heads`.
    """

    name = "the fused attention"
    kinds = ("fused_qkv_mha",)
    origin = ".*fused qkv projection"
    options: ClassVar[Options] = {"input_dim": int, "embed_dim": int, "num_heads": int}
    inputs = ("x", "q", "k", "v", "mask_*")

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        if "model" in config:
            return super().read(config)
        sizes = {name: config[name] for name in ("d", "heads") if name in config}
        sizes = read_options(sizes, {"d": int, "heads": int}, cls.name)
        return {"input_dim": sizes["d"], "embed_dim": sizes["d"], "num_heads": sizes["heads"]}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> MultiHeadAttention:
        width = options["input_dim"]
        return MultiHeadAttention(options["embed_dim"], options["num_heads"], query_dim=width, key_dim=width)

    @classmethod
    def layout_of(cls, module: MultiHeadAttention) -> Layout:
        heads = module.num_heads

        def by_head(parts: list[Tensor]) -> Tensor:
            return torch.stack([part.view(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)

        def by_projection(rows: Tensor, count: int) -> list[Tensor]:
            return [part.flatten(0, 1) for part in rows.reshape(heads, count, -1, *rows.shape[1:]).unbind(1)]

        return {"qkv_proj.*": Rule("{q,k,v}_proj.*", by_head, by_projection), "o_proj.*": "out_proj.*"}

    @classmethod
    def describe(cls, module: MultiHeadAttention) -> dict[str, Any]:
        embed_dim = module.out_proj.out_features
        widths = {getattr(module, name).in_features for name in PROJECTIONS[:3]}
        cls.refuse(
            {
                **own_heads(module),
                f"inputs of widths {sorted(widths)}": len(widths) > 1,
                "projections without biases": any(getattr(module, name).bias is None for name in PROJECTIONS),
                f"dropout {module.dropout_rate}": module.dropout_rate != 0,
            }
        )
        return {"input_dim": widths.pop(), "embed_dim": embed_dim, "num_heads": module.num_heads}

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        [x] = require(inputs, "x")
        answer: dict[str, Tensor] = {}
        masks = {name.removeprefix("in."): mask for name, mask in inputs.items() if name.startswith("in.mask_")}
        for name, mask in {"none": None, **masks}.items():
            holder, given = nn.ModuleDict({"attention": self.module}), None if mask is None else _allowed(mask)
            with uniform_when_empty(holder, "attention", given) as allowed:
                out, _, weights = self.module(x, mask=allowed, need_weights=True)
            answer |= {f"out.out_{name}": out, f"out.attn_{name}": weights}
        if "in.q" in inputs:
            qkv = require(inputs, "q", "k", "v")
            answer["out.sdp_values"], answer["out.sdp_attn"] = DotProductAttention()(*qkv, need_weights=True)
        return answer


def _allowed(mask: Tensor) -> Tensor:
    """Return (batch or 1, heads or 1, q_len, k_len), broadcast as in the tutorial."""
    if mask.dim() == 3:
        raise RequestError(
            f"a mask of shape {tuple(mask.shape)} may mean (batch, q_len, k_len) or (heads, q_len, k_len); the tutorial"
            " silently takes the latter. Add an axis of size 1 to say which: mask[:, None] or mask[None]."
        )
    if mask.dim() not in (2, 4):
        raise RequestError(f"a mask of shape {tuple(mask.shape)} must be (q_len, k_len), or have four axes.")
    return (mask != 0) if mask.dim() == 4 else (mask != 0)[None, None]
