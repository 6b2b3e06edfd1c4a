"""The two sublayers of a Reformer's layer: F, attention of one kind or another, and G, feed-forward.

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 3, eq. 7 and 9: y1 = x1 + F(x2), y2 = x2 + G(y1), with norm and
dropout inside F and G.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from manyheads.architectures.reformer.config import LayerKind, ReformerConfig, ReformerSeq2SeqConfig
from manyheads.nn.attention.cache import KeyValueCache
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.lsh_cache import LSHCache
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.layers import Dropout, FeedForward
from manyheads.nn.shapes import Float
from manyheads.seeding import derive_seed


@dataclass(frozen=True)
class Call:
    """The arguments that all layers of one call share.

    Args:
        lengths: real tokens of each row, padding on the right; None: all.
        hash_seed: seed of all rotations of this call.
        num_hashes: hash rounds; None: the config's; 0: exact attention.
        rotations: layer index -> rotations to use in place of drawn ones.
        is_shared: all layers draw the same rotations.
    """

    lengths: Tensor | None
    hash_seed: int
    num_hashes: int | None = None
    rotations: Mapping[int, Tensor] = field(default_factory=dict)
    is_shared: bool = False

    def seed_of(self, layer: int) -> int:
        """Return a different seed for every layer, or the same."""
        return self.hash_seed if self.is_shared else derive_seed(self.hash_seed, "rotations", layer)


class AttentionSublayer(nn.Module):
    """F: dropout(attention(LN(x))); see `nn.reversible.Sublayer`.

    Args: config: of the model; index: of the layer.
    """

    chunk_len = 0

    wiring = "reversible"

    @staticmethod
    def equation() -> tuple[str, str]:
        """Return the name and the equation of the changed stream; the module returns its addend, of the same shape."""
        return "changed stream", "x + attention(LN(x')), x' the other stream"

    def __init__(self, config: ReformerConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.kind: LayerKind = config.kinds[index]
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.self_attn = _attention(config, self.kind)
        self.keep_attention = config.keep_attention
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        call: Call,
        shared: tuple[Tensor, ...] = (),
        kept: tuple[Tensor, ...] | None = None,
    ) -> tuple[Float[Tensor, "batch length d_model"], tuple[Tensor, ...]]:
        """Return the addend of the other stream, and the values that attention keeps for the recomputation."""
        h = low_precision(self.norm(x))
        if isinstance(self.self_attn, LocalSelfAttention):
            return self.dropout(self.self_attn(h, lengths=call.lengths)), ()
        num_hashes = 0 if self.kind == "full" else call.num_hashes
        out, kept = self.self_attn.forward_keeping(
            h,
            kept,
            lengths=call.lengths,
            rotations=call.rotations.get(self.index),
            seed=call.seed_of(self.index),
            num_hashes=num_hashes,
            keep_output=self.keep_attention,
        )
        return self.dropout(out), kept

    def start(self, rows: int, call: Call) -> LSHCache | KeyValueCache:
        """Return an empty cache; see the kinds' `start`."""
        if isinstance(self.self_attn, LocalSelfAttention):
            return self.self_attn.start(rows)
        return self.self_attn.start(
            rows,
            rotations=call.rotations.get(self.index),
            seed=call.seed_of(self.index),
            num_hashes=0 if self.kind == "full" else call.num_hashes,
        )

    def step(
        self,
        x: Float[Tensor, "rows new_len d_model"],
        cache: LSHCache | KeyValueCache,
        lengths: Tensor | None,
    ) -> tuple[Float[Tensor, "rows new_len d_model"], LSHCache | KeyValueCache]:
        """Compute `forward` for the next positions of every row, with a cache of the earlier ones."""
        out, cache = self.self_attn.step(self.norm(x), cache, lengths)  # type: ignore[arg-type]
        return self.dropout(out), cache


class FeedForwardSublayer(nn.Module):
    """G: dropout(feed-forward(LN(x))), `ff_chunk_len` positions at a time; see `nn.reversible.Sublayer`."""

    wiring = "reversible"

    @staticmethod
    def equation() -> tuple[str, str]:
        return "changed stream", "x + feed-forward(LN(x')), x' the other stream"

    def __init__(self, config: ReformerConfig | ReformerSeq2SeqConfig) -> None:
        super().__init__()
        self.chunk_len = config.ff_chunk_len
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.net = FeedForward(config.d_model, config.d_ff, activation=config.activation, dropout=config.dropout)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        call: object = None,
        shared: tuple[Tensor, ...] = (),
        kept: tuple[Tensor, ...] | None = None,
    ) -> tuple[Float[Tensor, "batch length d_model"], tuple[Tensor, ...]]:
        """Return the addend of the other stream; nothing is kept."""
        return self.dropout(self.net(low_precision(self.norm(x)))), ()


class ReformerLayer(nn.Module):
    """F and G of one reversible layer."""

    def __init__(self, config: ReformerConfig, index: int) -> None:
        super().__init__()
        self.attention = AttentionSublayer(config, index)
        self.feed_forward = FeedForwardSublayer(config)


def _attention(config: ReformerConfig, kind: LayerKind) -> LSHSelfAttention | LocalSelfAttention:
    if kind == "local":
        return LocalSelfAttention(
            config.d_model,
            config.num_heads,
            config.width_of_heads,
            chunk_len=config.local_chunk_len,
            chunks_before=config.local_chunks_before,
            chunks_after=config.local_chunks_after,
            causal=config.causal,
            wrap=config.local_wrap,
            sloped=config.local_slopes,
            train_slopes=config.train_slopes,
            dropout=config.attention_dropout,
        )
    return LSHSelfAttention(
        config.d_model,
        config.num_heads,
        config.width_of_heads,
        settings=replace(config.lsh, num_hashes=0) if kind == "full" else config.lsh,
        max_len=config.max_len,
        dropout=config.attention_dropout,
    )
