"""The hashed attention of lucidrains' reformer-pytorch: LSHAttention, which has no weights.

Differs from ours: scores are divided by sqrt(head_dim) although the keys have unit length; the rounds form one ring, so
that a round's first chunk also attends to the last chunk of the round before; padding stays in its buckets; the weight
of a round is exp(l - logsumexp(l)) in float32, which is rounded so coarsely that the weights do not sum to 1 if a
position attends only to itself (l = -50,000); and the duplicate correction counts, for a pair across two rounds, the
meetings within one round, which are often zero, so that it adds log 1e9. The wrapper reproduces the last two from
outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, RequestError
from manyheads.interop.names import import_weights, pick, require
from manyheads.nn.attention.lsh import LSHSettings, hash_vectors, lsh_attention
from manyheads.nn.attention.lsh_pairs import keys_of, near_pairs

__all__ = [
    "ATTENTION_OPTIONS",
    "BareAttention",
    "PeerAttention",
    "bucket_peer_vectors",
    "from_peer",
    "matches",
    "peer_settings",
    "peer_weights",
    "replay_rounding",
]

ATTENTION_OPTIONS: dict[str, Any] = {
    "dropout": 0.0,
    "bucket_size": 64,
    "n_hashes": 8,
    "causal": False,
    "allow_duplicate_attention": True,
    "attend_across_buckets": True,
    "rehash_each_round": True,
    "drop_for_hash_rate": 0.0,
    "random_rotations_per_head": False,
    "return_attn": False,
}
_ITSELF = -5e4


class BareAttention(nn.Module):
    """Our attention function as a module without parameters."""

    def __init__(self, settings: LSHSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, qk: Tensor, v: Tensor, buckets: Tensor) -> Tensor:
        """See `lsh_attention`."""
        return lsh_attention(qk, v, buckets, self.settings)


def peer_settings(options: Mapping[str, Any], head_dim: int) -> LSHSettings:
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


def bucket_peer_vectors(qk: Tensor, rotations: Tensor, options: Mapping[str, Any]) -> Tensor:
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


def peer_weights(
    qk: Tensor, buckets: Tensor, settings: LSHSettings, hidden: Tensor | None = None, query_len: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the peer's weights, computed with its arithmetic for each pair, (1, rows, length, length), and the rows
    that
    attend only to themselves.

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


class PeerAttention:
    """LSHAttention, which has no weights; see `protocols.Wrapper`. options: the peer's arguments."""

    def __init__(self, module: BareAttention, options: Mapping[str, Any], query_len: int | None) -> None:
        self.module, self.options, self.query_len = module, options, query_len

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`. in.qk and in.v (rows, length, head_dim); in.rotations; in.input_mask and
        in.input_attn_mask, True = may attend.
        """
        qk, v = require(inputs, "in.qk")[None], require(inputs, "in.v")[None]
        settings, length = self.module.settings, qk.shape[2]
        if length % (2 * settings.chunk_len):
            raise RequestError(
                f"{length} positions are not a multiple of twice the bucket_size, {2 * settings.chunk_len}, which"
                " reformer-pytorch asks for."
            )
        buckets = bucket_peer_vectors(qk, require(inputs, "in.rotations"), self.options)
        hidden: Tensor | None = None
        if "in.input_mask" in inputs:
            real = inputs["in.input_mask"]
            hidden = ~(real[:, :, None] & real[:, None])
        if "in.input_attn_mask" in inputs:
            hidden = ~inputs["in.input_attn_mask"] | (hidden if hidden is not None else False)
        weights, alone = peer_weights(qk, buckets, settings, hidden, self.query_len)
        # Options that our attention does not have are computed for each pair.
        replayed = hidden is not None or self.query_len is not None or (settings.correct_duplicates and not self._one)
        out = torch.matmul(weights, v) if replayed else replay_rounding(self.module(qk, v, buckets), weights, alone)
        offsets = torch.arange(buckets.shape[2])[:, None] * (length // settings.chunk_len)
        return {
            "out.attn": weights[0, :, : self.query_len],
            "out.buckets": (buckets + offsets).flatten(2)[0],
            "out.out": out[0, :, : self.query_len],
        }

    @property
    def _one(self) -> bool:
        """Return whether no pair meets across two rounds."""
        return bool(self.options["n_hashes"] == 1 or not self.options["attend_across_buckets"])


def replay_rounding(out: Tensor, weights: Tensor, alone: Tensor) -> Tensor:
    """Return our output; for rows that attend only to themselves, the peer's sum of weights times their value."""
    return torch.where(alone[..., None], out * weights.sum(dim=-1, keepdim=True), out)


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    if "kind" in meta:
        return bool(meta["kind"] == "lucid_lsh")
    return str(meta.get("peer", "")).startswith("lucidrains/reformer-pytorch LSHAttention")


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> PeerAttention:
    """See `protocols.Loader.from_peer`. config: `opts` contains the peer's arguments; D is the width of a head, and
    query_len
    the number of queries if not all positions are queries.

    Raises: ConfigError: an unknown option. ModelFileError: weights are given, which this peer does not have.
    """
    options = pick(config.get("opts", {}), ATTENTION_OPTIONS, "LSHAttention")
    if "D" not in config:
        raise ConfigError("LSHAttention needs D, the width of a head, beside its options.")
    module = BareAttention(peer_settings(options, config["D"]))
    import_weights(module, state_dict, [])
    return PeerAttention(module.eval(), options, config.get("query_len"))
