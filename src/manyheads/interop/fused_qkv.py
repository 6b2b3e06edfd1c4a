"""The multi-head attention of a widely copied tutorial: one projection for queries, keys and values, head by head.

Differs from ours: rows of qkv_proj are those of head 0's query, key and value, then head 1's, and so on; masks say
0 = blocked, broadcast to (batch, heads, q_len, k_len), and fill with -9e15, so that a query that may attend to nothing
attends to all keys alike; its forward only runs where input_dim is embed_dim, ours always.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.interop.names import Pair, export_weights, import_weights, pick, require
from manyheads.interop.scores import PeerMask, scored_as, uniform_when_empty
from manyheads.nn.attention.dot_product import DotProductAttention
from manyheads.nn.attention.multi_head import PROJECTIONS, MultiHeadAttention

__all__ = ["FusedQkv", "from_peer", "matches", "to_peer"]

_OPTIONS: dict[str, Any] = {"input_dim": ..., "embed_dim": ..., "num_heads": ...}


class FusedQkv:
    """See `protocols.Wrapper`."""

    def __init__(self, module: MultiHeadAttention) -> None:
        self.module = module

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`: out.out_* and out.attn_* for in.x without a mask and with each in.mask_*, and
        scaled_dot_product for in.q, in.k, in.v if they are given.
        """
        masks = {name.removeprefix("in."): x for name, x in inputs.items() if name.startswith("in.mask_")}
        known = {"in.x", "in.q", "in.k", "in.v", *(f"in.{name}" for name in masks)}
        unknown = sorted(name for name in inputs if name.startswith(("in.", "rot.")) and name not in known)
        if unknown:
            raise RequestError(f"the fused attention has no input {unknown[0]}; it has {sorted(known)} and in.mask_*.")
        x, answer = require(inputs, "in.x"), {}
        for name, mask in {"none": None, **masks}.items():
            peer_mask = PeerMask() if mask is None else uniform_when_empty(_allowed(mask))
            with scored_as(nn.ModuleDict({"attention": self.module}), "attention", peer_mask) as allowed:
                answer[f"out.out_{name}"], _, answer[f"out.attn_{name}"] = self.module(
                    x, mask=allowed, need_weights=True
                )
        if "in.q" in inputs:
            given = [require(inputs, f"in.{name}") for name in ("q", "k", "v")]
            answer["out.sdp_values"], answer["out.sdp_attn"] = DotProductAttention()(*given, need_weights=True)
        return answer


def _allowed(mask: Tensor) -> Tensor:
    """Return (batch or 1, heads or 1, q_len, k_len), broadcast as in the tutorial."""
    if mask.dim() == 3:
        raise RequestError(
            f"a mask of shape {tuple(mask.shape)} may mean (batch, q_len, k_len) or (heads, q_len, k_len): the tutorial"
            " takes it for the latter without a word. Say which with an axis of 1: mask[:, None] or mask[None]."
        )
    if mask.dim() not in (2, 4):
        raise RequestError(f"a mask of shape {tuple(mask.shape)} must be (q_len, k_len), or have four axes.")
    return (mask != 0) if mask.dim() == 4 else (mask != 0)[None, None]


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    if "kind" in meta:
        return bool(meta["kind"] == "fused_qkv_mha")
    return "fused qkv projection" in str(meta.get("peer", ""))


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> FusedQkv:
    """See `protocols.Loader.from_peer`. config: `model` holds the constructor's arguments; or d and heads."""
    given = config.get("model")
    if given is None:
        sizes = {name: config.get(name, ...) for name in ("d", "heads")}
        sizes = pick(sizes, dict.fromkeys(sizes, ...), "the fused attention")
        given = {"input_dim": sizes["d"], "embed_dim": sizes["d"], "num_heads": sizes["heads"]}
    options = pick(given, _OPTIONS, "the fused attention")
    input_dim, embed_dim, heads = (options[name] for name in _OPTIONS)
    module = MultiHeadAttention(embed_dim, heads, query_dim=input_dim, key_dim=input_dim)
    weights = dict(state_dict)
    for kind in ("weight", "bias"):
        name = f"qkv_proj.{kind}"
        if name in weights and weights[name].shape[0] != 3 * embed_dim:
            raise ModelFileError(f"{name} has {weights[name].shape[0]} rows, the config asks for {3 * embed_dim}.")
        if name in weights:
            weights[name] = _regrouped(weights[name], heads, 3)
    import_weights(module, weights, _pairs())
    return FusedQkv(module.eval())


def to_peer(module: MultiHeadAttention) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer`: the constructor's arguments under `model`, and the weights.

    Raises: ConfigError: the peer does not support one of the options.
    """
    embed_dim, heads = module.out_proj.out_features, module.num_heads
    widths = {getattr(module, name).in_features for name in PROJECTIONS[:3]}
    refused = {
        f"head_dim {module.head_dim}": module.head_dim * heads != embed_dim,
        f"inputs of widths {sorted(widths)}": len(widths) > 1,
        "scores of its own": module.score is not None,
        "projections without biases": any(getattr(module, name).bias is None for name in PROJECTIONS),
        f"dropout {module.dropout_rate}": module.dropout_rate != 0,
    }
    for what, holds in refused.items():
        if holds:
            raise ConfigError(f"the fused attention cannot hold a module with {what}.")
    weights = export_weights(module.state_dict(), _pairs())
    for name in ("qkv_proj.weight", "qkv_proj.bias"):
        weights[name] = _regrouped(weights[name], 3, heads)
    return {"model": {"input_dim": widths.pop(), "embed_dim": embed_dim, "num_heads": heads}}, weights


def _regrouped(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder rows from (outer, inner, head_dim) to (inner, outer, head_dim)."""
    return rows.reshape(outer, inner, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def _pairs() -> list[Pair]:
    """Return the pairs of names, with the rows of qkv_proj in our order: all queries, all keys, all values."""
    qkv = [Pair(f"qkv_proj.{kind}", tuple(f"{name}.{kind}" for name in PROJECTIONS[:3])) for kind in ("weight", "bias")]
    return [*qkv, *(Pair(f"o_proj.{kind}", (f"out_proj.{kind}",)) for kind in ("weight", "bias"))]
