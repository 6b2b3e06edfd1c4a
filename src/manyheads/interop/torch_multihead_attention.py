"""torch.nn.MultiheadAttention: one matrix for queries, keys and values, blocking or additive masks, extra keys.

Its weights become a `MultiHeadAttention`; with `add_bias_kv` or `add_zero_attn`, which ours does not have, a
`TorchMultiheadAttention`. A query that may attend to nothing is NaN there and zeros here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import ConfigError, RequestError
from manyheads.interop.names import Pair, export_weights, import_weights, pick, require
from manyheads.nn.attention.multi_head import PROJECTIONS, MultiHeadAttention
from manyheads.nn.attention.torch_compatible import TorchMultiheadAttention, mask_of_torch

__all__ = ["TorchAttention", "from_peer", "matches", "to_peer"]

_OPTIONS: dict[str, Any] = {
    "embed_dim": ...,
    "num_heads": ...,
    "dropout": 0.0,
    "bias": True,
    "add_bias_kv": False,
    "add_zero_attn": False,
    "kdim": None,
    "vdim": None,
    "batch_first": False,
}
_INPUTS = ("query", "key", "value", "key_padding_mask", "attn_mask")


class TorchAttention:
    """See `protocols.Wrapper`. batch_first: layout of inputs and outputs."""

    def __init__(self, module: MultiHeadAttention | TorchMultiheadAttention, batch_first: bool) -> None:
        self.module, self.batch_first = module, batch_first

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`: out.out, and out.weights (batch, heads, q_len, k_len)."""
        known = {f"in.{name}" for name in _INPUTS}
        unknown = sorted(name for name in inputs if name.startswith(("in.", "rot.")) and name not in known)
        if unknown:
            raise RequestError(f"torch.nn.MultiheadAttention has no input {unknown[0]}; it has {sorted(known)}.")
        query, key, value = (require(inputs, f"in.{name}") for name in _INPUTS[:3])
        padding, pattern = inputs.get("in.key_padding_mask"), inputs.get("in.attn_mask")
        if isinstance(self.module, TorchMultiheadAttention):
            out, weights = self.module(query, key, value, padding, True, pattern, average_attn_weights=False)
            return {"out.out": out, "out.weights": weights}
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            padding = None if padding is None else padding[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        sizes = (query.shape[0], self.module.num_heads, query.shape[1], key.shape[1])
        mask = mask_of_torch(pattern, padding, *sizes)
        out, _, weights = self.module(query, key, value, mask=mask, need_weights=True)
        if not batched:
            return {"out.out": out[0], "out.weights": weights[0]}
        return {"out.out": out if self.batch_first else out.transpose(0, 1).contiguous(), "out.weights": weights}


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    if "kind" in meta:
        return bool(meta["kind"] == "torch_nn_mha")
    return str(meta.get("peer", "")).split(" ")[0] == "torch.nn.MultiheadAttention"


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> TorchAttention:
    """See `protocols.Loader.from_peer`. config: `model` holds torch.nn.MultiheadAttention's arguments."""
    options = pick(config.get("model", {}), _OPTIONS, "torch.nn.MultiheadAttention")
    module: MultiHeadAttention | TorchMultiheadAttention
    if options["add_bias_kv"] or options["add_zero_attn"]:
        module = TorchMultiheadAttention(**options)
        import_weights(module, state_dict, [Pair(name, (name,)) for name in module.state_dict()])
    else:
        module = MultiHeadAttention(
            options["embed_dim"],
            options["num_heads"],
            key_dim=options["kdim"],
            value_dim=options["vdim"] or options["embed_dim"],
            dropout=float(options["dropout"]),
            bias=bool(options["bias"]),
        )
        import_weights(module, state_dict, _pairs(module))
    return TorchAttention(module.eval(), bool(options["batch_first"]))


def to_peer(module: MultiHeadAttention | TorchMultiheadAttention) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer`: torch.nn.MultiheadAttention's arguments under `model` and its state dict.

    Raises: ConfigError: torch.nn.MultiheadAttention does not support one of the options.
    """
    if isinstance(module, TorchMultiheadAttention):
        bias = module.in_proj_bias is not None
        options = {"embed_dim": module.embed_dim, "num_heads": module.num_heads, "dropout": module.dropout}
        options |= {"bias": bias, "add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
        options |= {"kdim": module.kdim, "vdim": module.vdim, "batch_first": module.batch_first}
        return {"model": options}, {name: x.detach().clone() for name, x in module.state_dict().items()}
    embed_dim = module.out_proj.out_features
    biases = {getattr(module, name).bias is not None for name in PROJECTIONS}
    refused = {
        f"head_dim {module.head_dim}": module.head_dim * module.num_heads != embed_dim,
        f"query_dim {module.q_proj.in_features}": module.q_proj.in_features != embed_dim,
        "scores of its own": module.score is not None,
        "biases in some projections alone": len(biases) > 1,
    }
    for what, holds in refused.items():
        if holds:
            raise ConfigError(f"torch.nn.MultiheadAttention cannot hold a module with {what}.")
    options = {
        "embed_dim": embed_dim,
        "num_heads": module.num_heads,
        "dropout": module.dropout_rate,
        "bias": biases == {True},
        "kdim": module.k_proj.in_features,
        "vdim": module.v_proj.in_features,
        "batch_first": True,
    }
    return {"model": options}, export_weights(module.state_dict(), _pairs(module))


def _pairs(module: MultiHeadAttention) -> list[Pair]:
    widths = {getattr(module, name).in_features for name in PROJECTIONS[:3]}
    three = tuple(f"{name}.weight" for name in PROJECTIONS[:3])
    pairs = [Pair("out_proj.weight", ("out_proj.weight",))]
    if widths == {module.out_proj.out_features}:
        pairs.append(Pair("in_proj_weight", three))
    else:
        pairs += [Pair(name.replace(".", "_"), (name,)) for name in three]
    if module.q_proj.bias is not None:
        pairs.append(Pair("in_proj_bias", tuple(f"{name}.bias" for name in PROJECTIONS[:3])))
        pairs.append(Pair("out_proj.bias", ("out_proj.bias",)))
    return pairs
