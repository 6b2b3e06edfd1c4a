"""The complete reversible encoder-decoder.

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 5 (machine translation); the order of the decoder's three sublayers on
the two streams is that of trax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from manyheads.models.composites import Seq2Seq
from manyheads.models.reformer.model import FeedForwardSublayer
from manyheads.models.size_checks import check_vocabularies
from manyheads.nn.attention.cache import DecoderState, KeyValueCache, source_mask
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.lsh_cache import LSHCache
from manyheads.nn.attention.masks import Causal, Lengths
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.reversible import through_sublayers
from manyheads.nn.layers import Dropout
from manyheads.nn.positions import TokenEmbedding, positions_of_kind
from manyheads.seeding import derive_seed

if TYPE_CHECKING:
    from manyheads.models.reformer.config import ReformerSeq2SeqConfig
    from manyheads.nn.shapes import Float, Int

Kept = tuple[Tensor, ...]
Past = KeyValueCache | LSHCache


@dataclass(frozen=True)
class Side:
    """Inputs of the sublayers of one stack besides the streams.

    lengths: of this stack's rows, or None; source_lengths: of the rows for cross-attention; hash_seed: of this call's
    rotations.
    """

    lengths: Tensor | None
    source_lengths: Tensor
    hash_seed: int


class SelfSublayer(nn.Module):
    """dropout(self-attention(LN(x))), exact or hashed; see `nn.reversible.Sublayer`."""

    chunk_len = 0

    wiring = "reversible"
    reads_float32 = ("norm",)

    @staticmethod
    def equation() -> tuple[str, str]:
        return "changed stream", "x + attention(LN(x')), x' the other stream"

    def __init__(self, config: ReformerSeq2SeqConfig, name: str, index: int, *, causal: bool) -> None:
        super().__init__()
        self.name, self.index, self.causal = name, index, causal
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        heads, width, rate = config.num_heads, config.width_of_heads, config.attention_dropout
        self.is_exact = config.attention == "full"
        self.self_attn: MultiHeadAttention | LSHSelfAttention
        if self.is_exact:
            self.self_attn = MultiHeadAttention(config.d_model, heads, head_dim=width, dropout=rate, bias=False)
        else:
            settings = config.lsh if causal else replace(config.lsh, causal=False, visible="chunk", chunks_after=1)
            self.self_attn = LSHSelfAttention(
                config.d_model, heads, width, settings=settings, max_len=config.max_len, dropout=rate
            )
        self.keep_attention = config.keep_attention
        self.dropout = Dropout(config.dropout)

    def seed(self, side: Side) -> int:
        return derive_seed(side.hash_seed, self.name, self.index)

    def forward(
        self, x: Tensor, side: Side, shared: tuple[Tensor, ...] = (), kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """Return the output to add to the other stream, and the values that attention keeps for the recomputation."""
        h = self.norm(x)
        if self.is_exact:
            mask = Causal() if self.causal else Lengths(cast(Tensor, side.lengths))
            return self.dropout(self.self_attn(h, mask=mask)[0]), ()
        out, kept = cast(LSHSelfAttention, self.self_attn).forward_keeping(
            h, kept, lengths=side.lengths, seed=self.seed(side), keep_output=self.keep_attention
        )
        return self.dropout(out), kept

    def start(self, rows: int, side: Side, like: Tensor) -> Past:
        """Return an empty cache."""
        if self.is_exact:
            return cast(MultiHeadAttention, self.self_attn).empty_cache(rows, like)
        return cast(LSHSelfAttention, self.self_attn).start(rows, seed=self.seed(side))

    def step(self, x: Tensor, past: Past) -> tuple[Tensor, Past]:
        """Compute `forward` for the next positions of every row."""
        h = self.norm(x)
        if isinstance(past, LSHCache):
            return cast(LSHSelfAttention, self.self_attn).step(h, past)
        new_len = x.shape[1]
        (layer,), past = past.prepare(new_len)
        out = cast(MultiHeadAttention, self.self_attn).step(h, layer, Causal() if new_len > 1 else None)
        return out, past.after(new_len)


class CrossSublayer(nn.Module):
    """dropout(attention(LN(x), memory)), exact; see `nn.reversible.Sublayer`. The memory is `shared[0]`."""

    chunk_len = 0

    wiring = "reversible"
    reads_float32 = ("norm",)

    @staticmethod
    def equation() -> tuple[str, str]:
        return "changed stream", "x + attention(LN(x'), memory), x' the other stream"

    def __init__(self, config: ReformerSeq2SeqConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.cross_attn = MultiHeadAttention(
            config.d_model,
            config.num_heads,
            head_dim=config.width_of_heads,
            dropout=config.attention_dropout,
            bias=False,
        )
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: Tensor, side: Side, shared: tuple[Tensor, ...], kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """Return the output to add to the other stream."""
        out, _ = self.cross_attn(self.norm(x), shared[0], mask=Lengths(side.source_lengths))
        return self.dropout(out), ()


class EncoderLayer(nn.Module):
    """Self-attention, feed-forward."""

    def __init__(self, config: ReformerSeq2SeqConfig, index: int) -> None:
        super().__init__()
        self.attention = SelfSublayer(config, "encoder", index, causal=False)
        self.feed_forward = FeedForwardSublayer(config)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source, feed-forward."""

    def __init__(self, config: ReformerSeq2SeqConfig, index: int) -> None:
        super().__init__()
        self.attention = SelfSublayer(config, "decoder", index, causal=True)
        self.source_attention = CrossSublayer(config)
        self.feed_forward = FeedForwardSublayer(config)


class ReformerTranslator(nn.Module):
    """Encoder states from source ids, and decoder states from target ids and encoder states, through reversible layers.

    Both stacks start with the embedding in both streams and end with the norm of the streams' mean. If a hash seed is
    needed, training draws it from torch's generator, as dropout does, and evaluation uses the config's. The head that
    predicts words is separate (see `models.composites`).

    Args: config: sizes and options; both vocabulary sizes must be set.
    Raises: ConfigError: a vocabulary size is missing.
    """

    reads_float32 = ("encoder_norm", "decoder_norm")
    traced_parts: ClassVar = {
        "encoder_norm": ("memory", "LN((x₁ + x₂) / 2), of the two streams"),
        "decoder_norm": ("hidden states", "LN((x₁ + x₂) / 2), of the two streams"),
    }

    def __init__(self, config: ReformerSeq2SeqConfig) -> None:
        super().__init__()
        check_vocabularies(config, "source_vocab_size", "target_vocab_size")
        self.config = config
        self.source_embedding = TokenEmbedding(config.source_vocab_size, config.d_model)
        self.target_embedding = TokenEmbedding(config.target_vocab_size, config.d_model)
        self.source_positions = positions_of_kind(config.positions, config.d_model, config.max_len)
        self.target_positions = positions_of_kind(config.positions, config.d_model, config.max_len)
        self.dropout = Dropout(config.dropout)
        self.encoder_layers = nn.ModuleList(EncoderLayer(config, i) for i in range(config.num_encoder_layers))
        self.encoder_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.decoder_layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_decoder_layers))
        self.decoder_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the parameters that the config shares."""
        if self.config.tie_embeddings in ("all", "embeddings"):
            self.target_embedding.weight = self.source_embedding.weight

    def _seed(self) -> int:
        """Return the seed of a call's hashes; 0 without hashing, which does not use the generator."""
        if self.config.attention == "full":
            return 0
        return int(torch.randint(1 << 62, (), device="cpu")) if self.training else self.config.hash_seed

    def encode(
        self, source: Int[Tensor, "batch source_len"], source_lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch source_len d_model"]:
        """Encode the source. Rows are padded on the right; states at padding are undefined."""
        # The streams stay in float32 under autocast, so that subtraction restores the inputs.
        x = self.dropout(self.source_positions(self.source_embedding(source)))
        side = Side(source_lengths, source_lengths, self._seed())
        layers = cast(list[EncoderLayer], list(self.encoder_layers))
        sublayers = [one for layer in layers for one in (layer.attention, layer.feed_forward)]
        x1, x2 = through_sublayers(sublayers, x, x, side, reversible=self.config.reversible)
        return self.encoder_norm((x1 + x2) / 2)  # type: ignore[no-any-return]

    def decode(
        self,
        target: Int[Tensor, "batch target_len"],
        memory: Float[Tensor, "batch source_len d_model"],
        source_lengths: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch target_len d_model"]:
        """Return states from which the head predicts the token after each target position, without attending to later
        ones.
        """
        x = self.dropout(self.target_positions(self.target_embedding(target)))
        side = Side(None, source_lengths, self._seed())
        sublayers = [
            one for layer in self._decoder() for one in (layer.attention, layer.source_attention, layer.feed_forward)
        ]
        x1, x2 = through_sublayers(sublayers, x, x, side, (memory,), reversible=self.config.reversible)
        return self.decoder_norm((x1 + x2) / 2)  # type: ignore[no-any-return]

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Compute `encode`, then `decode`: (batch, target_len, d_model)."""
        return self.decode(target, self.encode(source, source_lengths), source_lengths)

    def start(self, source: Tensor, source_lengths: Tensor) -> DecoderState:
        """Return the state before the first target token: one row per sentence."""
        return self.start_after(self.encode(source, source_lengths), source_lengths)

    def start_after(self, memory: Tensor, source_lengths: Tensor) -> DecoderState:
        """`start` of sources that are encoded already."""
        side, rows = Side(None, source_lengths, self.config.hash_seed), memory.shape[0]
        keys = [layer.source_attention.cross_attn.project_memory(memory) for layer in self._decoder()]
        past = [layer.attention.start(rows, side, keys[0][0]) for layer in self._decoder()]
        return DecoderState.begin(past, keys, source_mask(source_lengths, memory.shape[1]))

    def step(
        self, tokens: Int[Tensor, "rows new_len"], state: DecoderState
    ) -> tuple[Float[Tensor, "rows new_len d_model"], DecoderState]:
        """Compute `decode` for the next tokens of every row; the time depends on the new tokens only."""
        x = self.target_positions(self.target_embedding(tokens), int(state.length))
        # Each sublayer adds to one stream a function of the other stream; then the two are exchanged.
        x1, x2, caches = x, x, []
        source = zip(state.source.keys, state.source.values, strict=True)
        for layer, past, (key, value) in zip(self._decoder(), state.past, source, strict=True):
            added, past = layer.attention.step(x2, past)
            caches.append(past)
            x1, x2 = x2, x1 + added
            across = layer.source_attention
            added = across.cross_attn.step_across(across.norm(x2), key, value, state.memory_mask)
            x1, x2 = x2, x1 + added
            x1, x2 = x2, x1 + layer.feed_forward(x2)[0]
        hidden = self.decoder_norm((x1 + x2) / 2)
        return hidden, replace(state, past=tuple(caches), length=state.length + tokens.shape[1])

    def _decoder(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.decoder_layers))


def build_seq2seq(config: ReformerSeq2SeqConfig) -> Seq2Seq:
    """Return the encoder-decoder's body and head, with random weights."""
    check_vocabularies(config, "source_vocab_size", "target_vocab_size")
    head = LinearHead(config.d_model, config.target_vocab_size)
    return Seq2Seq(ReformerTranslator(config), head, config)
