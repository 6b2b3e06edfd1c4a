"""The hashed self-attention module of lucidrains' reformer-pytorch: LSHSelfAttention.

Differs from ours as described in `reformer_pytorch`; its output projection has a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.interop.names import Pair, export_weights, import_weights, pick, require
from manyheads.interop.reformer_pytorch import (
    ATTENTION_OPTIONS,
    bucket_peer_vectors,
    peer_settings,
    peer_weights,
    replay_rounding,
)
from manyheads.nn.attention.lsh import LSHSelfAttention, LSHSettings, lsh_attention
from manyheads.nn.attention.multi_head import merge_heads, split_heads

__all__ = ["PeerSelfAttention", "from_peer", "matches", "to_peer"]

_MODULE: dict[str, Any] = {
    "dim": ...,
    "heads": 8,
    "dim_head": None,
    "attn_chunks": 1,
    "full_attn_thres": None,
    "use_full_attn": False,
    "num_mem_kv": 0,
    "one_value_head": False,
    "n_local_attn_heads": 0,
    "post_attn_dropout": 0.0,
    **{
        name: value
        for name, value in ATTENTION_OPTIONS.items()
        if name not in ("rehash_each_round", "drop_for_hash_rate")
    },
}
# Options that change the output, and the only value of each that we support.
_FIXED: dict[str, Any] = {"num_mem_kv": 0, "one_value_head": False, "n_local_attn_heads": 0}
_PAIRS = [
    Pair("toqk.weight", ("qk_proj.weight",)),
    Pair("tov.weight", ("v_proj.weight",)),
    Pair("to_out.weight", ("out_proj.weight",)),
    Pair("to_out.bias", ("out_proj.bias",)),
]


class PeerSelfAttention:
    """LSHSelfAttention; see `protocols.Wrapper`. options: the peer's arguments."""

    def __init__(self, module: LSHSelfAttention, options: Mapping[str, Any]) -> None:
        self.module, self.options = module, options

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`. in.x (batch, length, dim); in.rotations."""
        x = require(inputs, "in.x")
        module, settings = self.module, self.module.settings
        if module.is_exact(x.shape[1]):
            return {"out.out": module(x)}
        heads = split_heads(module.qk_proj(x), module.num_heads).flatten(0, 1)[None]
        # The peer merges heads and rows into one axis: with separate rotations, each row has its own.
        rotations = require(inputs, "in.rotations")
        buckets = bucket_peer_vectors(heads, rotations, self.options)
        buckets = buckets.view(x.shape[0], module.num_heads, *buckets.shape[2:])
        qk, v = split_heads(module.qk_proj(x), module.num_heads), split_heads(module.v_proj(x), module.num_heads)
        weights, alone = peer_weights(heads, buckets.flatten(0, 1)[None], settings)
        if settings.correct_duplicates and not (self.options["n_hashes"] == 1 or settings.within_bucket):
            attended = torch.matmul(weights.view(*qk.shape[:3], -1), v)
        else:
            attended = lsh_attention(qk, v, buckets, settings)
            attended = replay_rounding(attended, weights.view(*qk.shape[:3], -1), alone.view(qk.shape[:3]))
        return {"out.out": module.out_proj(merge_heads(attended))}


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    if "kind" in meta:
        return bool(meta["kind"] == "lucid_lsh_self")
    return str(meta.get("peer", "")).startswith("lucidrains/reformer-pytorch LSHSelfAttention")


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> PeerSelfAttention:
    """See `protocols.Loader.from_peer`. config: `opts` contains the peer's arguments.

    Raises: ConfigError: an unsupported option. ModelFileError: names or shapes that do not match.
    """
    options = pick(config.get("opts", {}), _MODULE, "LSHSelfAttention")
    for name, value in _FIXED.items():
        if options[name] != value:
            raise ConfigError(f"{name} is {options[name]!r}; only {value!r} has a counterpart here.")
    head_dim = options["dim_head"] or options["dim"] // options["heads"]
    exact = options["bucket_size"] if options["full_attn_thres"] is None else options["full_attn_thres"]
    # The number of buckets is set to 2, because it depends on the length: the given rotations determine it.
    settings = replace(peer_settings(options, head_dim), exact_len=exact, num_buckets=2)
    if options["use_full_attn"]:
        settings = replace(settings, num_hashes=0)
    module = LSHSelfAttention(
        options["dim"], options["heads"], head_dim, settings=settings, max_len=exact + 1, bias=True
    )
    import_weights(module, state_dict, _PAIRS)
    return PeerSelfAttention(module.eval(), options)


def to_peer(module: LSHSelfAttention) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer` for LSHSelfAttention: its arguments (under `opts`) and its state dict.

    Raises: ConfigError: reformer-pytorch does not support one of the settings.
    """
    settings = module.settings
    options = {
        "dim": module.qk_proj.in_features,
        "heads": module.num_heads,
        "dim_head": module.head_dim,
        "bucket_size": settings.chunk_len,
        "n_hashes": settings.num_hashes or _MODULE["n_hashes"],
        "use_full_attn": settings.num_hashes == 0,
        "causal": settings.causal,
        "allow_duplicate_attention": not settings.correct_duplicates,
        "attend_across_buckets": not settings.within_bucket,
        "full_attn_thres": settings.exact_len,
        "dropout": module.dropout_rate,
    }
    wanted = peer_settings({**ATTENTION_OPTIONS, **options}, module.head_dim)
    for name in (field.name for field in fields(LSHSettings)):
        if name not in ("num_hashes", "num_buckets", "exact_len") and getattr(settings, name) != getattr(wanted, name):
            raise ConfigError(
                f"reformer-pytorch cannot hold attention with {name} {getattr(settings, name)!r}; it has"
                f" {getattr(wanted, name)!r}."
            )
    if module.out_proj.bias is None:
        raise ConfigError("reformer-pytorch's output projection has a bias; this one has none.")
    return {"opts": options}, export_weights(dict(module.named_parameters()), _PAIRS)
