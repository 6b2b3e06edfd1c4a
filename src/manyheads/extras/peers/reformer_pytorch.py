"""The hashed attention of lucidrains' reformer-pytorch: LSHAttention, which has no weights, and LSHSelfAttention.

Differs from ours: scores are divided by sqrt(head_dim) although the keys have unit length; the rounds form one ring, so
that a round's first chunk also attends to the last chunk of the round before; padding stays in its buckets; the weight
of a round is exp(l - logsumexp(l)) in float32, which is rounded so coarsely that the weights do not sum to 1 if a
position attends only to itself (l = -50,000); and the duplicate correction counts, for a pair across two rounds, the
meetings within one round, which are often zero, so that it adds log 1e9. The wrappers reproduce the last two from
outside. The output projection of LSHSelfAttention has a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, RequestError
from manyheads.extras.peers.peer import Options, Peer, require
from manyheads.nn.attention.lsh import LSHSelfAttention, LSHSettings, hash_vectors, lsh_attention
from manyheads.nn.attention.lsh_hash import keys_of, near_pairs
from manyheads.nn.attention.multi_head import merge_heads, split_heads

if TYPE_CHECKING:
    from manyheads.extras.peers.peer import Layout

_ATTENTION: dict[str, Any] = {
    "dropout": 0.0,
    "bucket_size": 64,
    "n_hashes": 8,
    "causal": False,
    "allow_duplicate_attention": True,
    "attend_across_buckets": True,
    "random_rotations_per_head": False,
    "return_attn": False,
}
"""The arguments that both modules have."""
_ITSELF = -5e4


class BareAttentionPeer(Peer):
    """LSHAttention. in.qk and in.v (rows, length, head_dim); in.rotations; in.input_mask and in.input_attn_mask, True =
    may attend. A config has D, the width of a head, beside the options, and query_len, the number of queries, if not
    all positions are queries.
    """

    name = "LSHAttention"
    kinds = ("lucid_lsh",)
    origin = "lucidrains/reformer-pytorch LSHAttention"
    options: ClassVar[Options] = {**_ATTENTION, "rehash_each_round": True, "drop_for_hash_rate": 0.0}
    section = "opts"

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        options = super().read(config)
        if "D" not in config:
            raise ConfigError("LSHAttention needs D, the width of a head, beside its options.")
        return {**options, "D": config["D"]}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> BareAttention:
        return BareAttention(_settings(options, options["D"]))

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        qk, v = (x[None] for x in require(inputs, "qk", "v"))
        settings, length, query_len = self.module.settings, qk.shape[2], self.config.get("query_len")
        if length % (2 * settings.chunk_len):
            raise RequestError(
                f"{length} positions are not a multiple of twice the bucket_size, {2 * settings.chunk_len}, which"
                " reformer-pytorch asks for."
            )
        [rotations] = require(inputs, "rotations")
        buckets = _buckets(qk, rotations, self.chosen)
        hidden: Tensor | None = None
        if "in.input_mask" in inputs:
            real = inputs["in.input_mask"]
            hidden = ~(real[:, :, None] & real[:, None])
        if "in.input_attn_mask" in inputs:
            hidden = ~inputs["in.input_attn_mask"] | (hidden if hidden is not None else False)
        weights, alone = _weights(qk, buckets, settings, hidden, query_len)
        # Options that our attention does not have are computed for each pair.
        replayed = hidden is not None or query_len is not None or _corrects_across_rounds(settings)
        out = torch.matmul(weights, v) if replayed else _rounded(self.module(qk, v, buckets), weights, alone)
        offsets = torch.arange(buckets.shape[2])[:, None] * (length // settings.chunk_len)
        return {
            "out.attn": weights[0, :, :query_len],
            "out.buckets": (buckets + offsets).flatten(2)[0],
            "out.out": out[0, :, :query_len],
        }


class SelfAttentionPeer(Peer):
    """LSHSelfAttention. in.x (batch, length, dim); in.rotations."""

    name = "reformer-pytorch's LSHSelfAttention"
    kinds = ("lucid_lsh_self",)
    origin = "lucidrains/reformer-pytorch LSHSelfAttention"
    fixed: ClassVar[Mapping[str, Any]] = {"num_mem_kv": 0, "one_value_head": False, "n_local_attn_heads": 0}
    """Options that change the output, and the only value of each that we support."""
    options: ClassVar[Options] = {
        "dim": int,
        "heads": 8,
        "dim_head": int | None,
        "attn_chunks": 1,
        "full_attn_thres": int | None,
        "use_full_attn": False,
        "post_attn_dropout": 0.0,
        **fixed,
        **_ATTENTION,
    }
    layout: ClassVar[Layout] = {"to{qk,v}.weight": "{qk,v}_proj.weight", "to_out.*": "out_proj.*"}
    section = "opts"

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LSHSelfAttention:
        for name, value in cls.fixed.items():
            if options[name] != value:
                raise ConfigError(f"{name} is {options[name]!r}; only {value!r} has a counterpart here.")
        head_dim = options["dim_head"] or options["dim"] // options["heads"]
        exact = options["bucket_size"] if options["full_attn_thres"] is None else options["full_attn_thres"]
        # The number of buckets is set to 2, because it depends on the length: the given rotations determine it.
        settings = replace(_settings(options, head_dim), exact_len=exact, num_buckets=2)
        if options["use_full_attn"]:
            settings = replace(settings, num_hashes=0)
        return LSHSelfAttention(
            options["dim"], options["heads"], head_dim, settings=settings, max_len=exact + 1, bias=True
        )

    @classmethod
    def describe(cls, module: LSHSelfAttention) -> dict[str, Any]:
        cls.refuse({"an output projection without a bias": module.out_proj.bias is None})
        settings = module.settings
        options = {
            "dim": module.qk_proj.in_features,
            "heads": module.num_heads,
            "dim_head": module.head_dim,
            "bucket_size": settings.chunk_len,
            "n_hashes": settings.num_hashes or cls.options["n_hashes"],
            "use_full_attn": settings.num_hashes == 0,
            "causal": settings.causal,
            "allow_duplicate_attention": not settings.correct_duplicates,
            "attend_across_buckets": not settings.within_bucket,
            "full_attn_thres": settings.exact_len,
            "dropout": module.dropout_rate,
        }
        wanted = vars(_settings({**_ATTENTION, **options}, module.head_dim))
        free = ("num_hashes", "num_buckets", "exact_len")
        cls.demand(settings, {name: value for name, value in wanted.items() if name not in free})
        return options

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        [x] = require(inputs, "x")
        module, settings = self.module, self.module.settings
        if module.is_exact(x.shape[1]):
            return {"out.out": module(x)}
        heads = split_heads(module.qk_proj(x), module.num_heads).flatten(0, 1)[None]
        # The peer merges heads and rows into one axis: with separate rotations, each row has its own.
        [rotations] = require(inputs, "rotations")
        buckets = _buckets(heads, rotations, self.chosen)
        buckets = buckets.view(x.shape[0], module.num_heads, *buckets.shape[2:])
        qk, v = split_heads(module.qk_proj(x), module.num_heads), split_heads(module.v_proj(x), module.num_heads)
        weights, alone = _weights(heads, buckets.flatten(0, 1)[None], settings)
        if _corrects_across_rounds(settings):
            attended = torch.matmul(weights.view(*qk.shape[:3], -1), v)
        else:
            attended = lsh_attention(qk, v, buckets, settings)
            attended = _rounded(attended, weights.view(*qk.shape[:3], -1), alone.view(qk.shape[:3]))
        return {"out.out": module.out_proj(merge_heads(attended))}


class BareAttention(nn.Module):
    """Our attention function as a module without parameters."""

    def __init__(self, settings: LSHSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, qk: Tensor, v: Tensor, buckets: Tensor) -> Tensor:
        return lsh_attention(qk, v, buckets, self.settings)


def _settings(options: Mapping[str, Any], head_dim: int) -> LSHSettings:
    """Convert the peer's arguments to ours. options: complete."""
    return LSHSettings(
        num_hashes=options["n_hashes"],
        chunk_len=options["bucket_size"],
        causal=options["causal"],
        visible="chunk",
        within_bucket=not options["attend_across_buckets"],
        correct_duplicates=not options["allow_duplicate_attention"],
        look_across_rounds=True,
        wrap=True,
        scale=head_dim**-0.5,
        key_eps=1e-24 / head_dim,
    )


def _buckets(qk: Tensor, rotations: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the buckets by the rotations that the peer drew.

    Shape: qk (1, rows, length, head_dim), rotations (1 or rows, head_dim, rounds or 1, directions) -> (1, rows, rounds,
        length).
    """
    rotations = rotations.expand(qk.shape[1], -1, -1, -1)
    directions = rotations.shape[-1]
    if options.get("rehash_each_round", True):
        return hash_vectors(qk, rotations, (2 * directions,))
    # One rotation for all rounds: the last round uses the best bucket, the round before it the second best, and so on.
    rotated = torch.matmul(qk, rotations[:, :, 0])
    ranked = torch.cat([rotated, -rotated], dim=-1).argsort(dim=-1)
    return ranked[..., -options["n_hashes"] :].transpose(-1, -2)


def _weights(
    qk: Tensor, buckets: Tensor, settings: LSHSettings, hidden: Tensor | None = None, query_len: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the peer's weights, computed with its arithmetic for each pair, (1, rows, length, length), and the rows
    that attend only to themselves.

    Args: hidden: True at masked inputs. query_len: all queries attend to the positions from it on.
    """
    rows, length, rounds = qk.shape[1], qk.shape[2], buckets.shape[2]
    positions = torch.arange(length)
    later = positions[:, None] < positions
    if query_len is not None and query_len < length:
        later = later & (positions < query_len)
    itself = torch.eye(length, dtype=torch.bool)
    scores = torch.matmul(qk, keys_of(qk, settings.scale, settings.key_eps).transpose(-1, -2))
    lowest = -torch.finfo(scores.dtype).max
    if hidden is not None:
        scores = scores.masked_fill(hidden, lowest)
    if settings.causal:
        scores = scores.masked_fill(later, lowest)
    scores = scores.masked_fill(itself, _ITSELF)
    if settings.correct_duplicates:
        alike = LSHSettings(
            **{name: getattr(settings, name) for name in ("chunk_len", "causal", "visible", "within_bucket")},
            num_hashes=rounds,
            wrap=rounds == 1,
        )
        meetings = near_pairs(buckets, alike).clamp(max=1).sum(dim=2)
        scores = scores - torch.log(meetings + 1e-9)
    near = near_pairs(buckets, settings)
    of_round = scores[:, :, None].expand(-1, -1, rounds, -1, -1)
    shown = of_round.masked_fill(near == 0, -torch.inf)
    highest = shown.amax(dim=-1, keepdim=True)
    powers = near * torch.exp(shown - highest)
    logits = highest + powers.sum(dim=-1, keepdim=True).log()  # (1, rows, rounds, length, 1)
    shares = torch.exp(logits - torch.logsumexp(logits, dim=2, keepdim=True))
    weights = (near * torch.exp(shown - logits) * shares).sum(dim=2)
    others = (near.sum(dim=2) > 0) & ~itself & (scores > _ITSELF)
    return weights.view(1, rows, length, length), ~others.any(dim=-1)


def _corrects_across_rounds(settings: LSHSettings) -> bool:
    """Return whether the peer corrects duplicates of pairs that meet across two rounds, as ours does not."""
    return settings.correct_duplicates and settings.num_hashes > 1 and not settings.within_bucket


def _rounded(out: Tensor, weights: Tensor, alone: Tensor) -> Tensor:
    """Return our output; for rows that attend only to themselves, the peer's sum of weights times their value."""
    return torch.where(alone[..., None], out * weights.sum(dim=-1, keepdim=True), out)
