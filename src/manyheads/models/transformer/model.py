"""The encoder-decoder Transformer, top to bottom.

Paper: Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762; the layers: sec. 3.1, figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.models.composites import Seq2Seq
from manyheads.models.size_checks import HeadKind, check_vocabularies
from manyheads.nn.attention.cache import DecoderLayerStep, DecoderState, KeyValueCache, source_mask
from manyheads.nn.attention.masks import Causal, Lengths, Mask, NeverEmpty, Segments
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.dropout import numbered_tokens
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.layers import Dropout, FeedForward, Residual, build_norm
from manyheads.nn.positions import RotaryPositions, TokenEmbedding, positions_of_kind

if TYPE_CHECKING:
    from manyheads.data.batch import PackedBatch
    from manyheads.models.transformer.config import TransformerConfig
    from manyheads.nn.attention.relative_bias import RelativeBias
    from manyheads.nn.shapes import Float, Int


def relative_biases(config: TransformerConfig, stack: Literal["encoder", "decoder"]) -> list[RelativeBias | None]:
    """Return the relative bias of each layer's self-attention: one for all, or one for each if heads are pruned."""
    heads = config.heads_by_layer()[stack]
    if not config.relative_bias:
        return [None] * len(heads)
    from manyheads.nn.attention.relative_bias import RelativeBias

    made: list[RelativeBias | None] = [
        RelativeBias(count, config.relative_bias, causal=stack == "decoder")
        for count in (heads if config.has_pruned(stack) else heads[:1])
    ]
    return made if len(made) == len(heads) else made * len(heads)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward. Shape: (batch, source_len, d_model) in and out.

    Args: index: number of the layer, from 0. relative_bias, rotary: of self-attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        index: int = 0,
        relative_bias: RelativeBias | None = None,
        rotary: RotaryPositions | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = _attention(config, "encoder", config.heads_in_layer("encoder", index), relative_bias, rotary)
        self.feed_forward = FeedForward.of(config, config.d_ff_of("encoder"))
        self.self_attn_residual = Residual.of(config)
        self.feed_forward_residual = Residual.of(config)

    def forward(self, x: Tensor, mask: Mask | None) -> Tensor:
        x = self.self_attn_residual(x, lambda h: self.self_attn(h, mask=mask)[0])
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the source, feed-forward. Shape: (batch, target_len, d_model) in and out.

    Args: index: number of the layer, from 0. relative_bias, rotary: of self-attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        index: int = 0,
        relative_bias: RelativeBias | None = None,
        rotary: RotaryPositions | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = _attention(config, "decoder", config.heads_in_layer("decoder", index), relative_bias, rotary)
        self.cross_attn = _attention(config, "decoder", config.heads_in_layer("cross", index))
        self.feed_forward = FeedForward.of(config, config.d_ff_of("decoder"))
        self.self_attn_residual = Residual.of(config)
        self.cross_attn_residual = Residual.of(config)
        self.feed_forward_residual = Residual.of(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | None,
        memory_mask: Mask | None,
    ) -> Tensor:
        """All target positions at once, as in training."""
        x = self.self_attn_residual(x, lambda h: self.self_attn(h, mask=mask)[0])
        x = self.cross_attn_residual(x, lambda h: self.cross_attn(h, memory, mask=memory_mask)[0])
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]

    def step(
        self,
        x: Tensor,
        layer: DecoderLayerStep,
        mask: Mask | None,
        memory_mask: Mask | None,
        rotation: Tensor | None = None,
    ) -> Tensor:
        """`forward` for the next target positions of every row. Shape: (rows, new_len, d_model) in and out."""

        def attend_memory(h: Tensor) -> Tensor:
            return self.cross_attn.step_across(h, layer.source_key, layer.source_value, memory_mask)

        x = self.self_attn_residual(x, lambda h: self.self_attn.step(h, layer.past, mask, rotation))
        x = self.cross_attn_residual(x, attend_memory)
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


def _attention(
    config: TransformerConfig,
    stack: Literal["encoder", "decoder"],
    heads: int,
    relative_bias: RelativeBias | None = None,
    rotary: RotaryPositions | None = None,
) -> MultiHeadAttention:
    head_dim = config.head_dim_of(stack)
    return MultiHeadAttention(
        config.d_model,
        heads,
        head_dim=head_dim,
        value_head_dim=config.value_dim_of(stack),
        dropout=config.attention_dropout,
        bias=config.bias,
        score=config.attention.score(heads, head_dim),
        relative_bias=relative_bias,
        num_kv_heads=config.num_kv_heads or None,
        rotary=rotary,
    )


@dataclass(frozen=True)
class PreparedStep:
    """All that `Transformer.compute_step` needs; see `protocols.PreparesSteps`.

    Shape: tokens (rows, new_len) ids; positions (new_len, d_model), added to their embeddings; rotation (new_len,
        head_dim), see `RotaryPositions.rows`; source_seen as in `DecoderState`.
    """

    tokens: Tensor
    positions: Tensor
    rotation: Tensor | None
    layers: tuple[DecoderLayerStep, ...]
    mask: Mask | None
    source_seen: Tensor | None
    can_compile: bool

    @property
    def memory_mask(self) -> Mask | None:
        return None if self.source_seen is None else NeverEmpty(self.source_seen)

    @property
    def kind(self) -> tuple[object, ...]:
        past = self.layers[0].past
        return past.key.dtype, len(past.key) == 1, past.slots.seen is not None

    def for_compiler(self) -> PreparedStep:
        """See `protocols.PreparedStep`: with or without padding in the source, one program."""
        seen = self.source_seen
        if seen is None:
            sentences, _, source_len, _ = self.layers[0].source_key.shape
            seen = torch.ones(sentences, 1, 1, source_len, dtype=torch.bool, device=self.tokens.device)
        # A copy, because a view that begins elsewhere would be compiled anew.
        rotation = None if self.rotation is None else self.rotation.clone()
        return replace(self, positions=self.positions.clone(), rotation=rotation, source_seen=seen)


class Encoder(nn.Module):
    """A stack of `EncoderLayer`s. Shape: (batch, source_len, d_model) in and out."""

    traced_parts: ClassVar = {"norm": ("memory", "LN(x)")}
    """Parts, which it may lack, whose output tables of tensors show: the tensor's name and equation."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        rotary = RotaryPositions.of(config, config.head_dim_of("encoder"))
        self.layers = nn.ModuleList(
            EncoderLayer(config, index, bias, rotary) for index, bias in enumerate(relative_biases(config, "encoder"))
        )
        self.norm = (
            build_norm(config.norm, config.d_model, config.norm_eps, config.bias) if config.has_final_norm else None
        )

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x if self.norm is None else self.norm(x)


class Decoder(nn.Module):
    """A stack of `DecoderLayer`s. Shape: (batch, target_len, d_model) in and out."""

    traced_parts: ClassVar = {"norm": ("hidden states", "LN(x)")}

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        rotary = RotaryPositions.of(config, config.head_dim_of("decoder"))
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, bias, rotary) for index, bias in enumerate(relative_biases(config, "decoder"))
        )
        self.norm = (
            build_norm(config.norm, config.d_model, config.norm_eps, config.bias) if config.has_final_norm else None
        )

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
    ) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask)
        return x if self.norm is None else self.norm(x)

    def _layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    def start(self, memory: Tensor, source_seen: Tensor | None = None) -> DecoderState:
        """Project the encoder's output once for all steps. source_seen: see `DecoderState`."""
        source = [layer.cross_attn.project_memory(memory) for layer in self._layers()]
        past = [layer.self_attn.empty_cache(memory.shape[0], like=source[0][0]) for layer in self._layers()]
        return DecoderState.begin([KeyValueCache.of_layers(past)], source, source_seen)

    def step(
        self,
        x: Tensor,
        layers: tuple[DecoderLayerStep, ...],
        mask: Mask | None,
        memory_mask: Mask | None,
        rotation: Tensor | None = None,
    ) -> Tensor:
        """`forward` for the next target positions of every row. Shape: (rows, new_len, d_model) in and out."""
        for layer, prepared in zip(self._layers(), layers, strict=True):
            x = layer.step(x, prepared, mask, memory_mask, rotation)
        return x if self.norm is None else self.norm(x)

    @property
    def rotary(self) -> RotaryPositions | None:
        """What rotates queries and keys of self-attention."""
        return self._layers()[0].self_attn.rotary

    @property
    def needs_weights(self) -> bool:
        """Whether some layer must compute its attention weights."""
        return any(one.needs_weights for layer in self._layers() for one in (layer.self_attn, layer.cross_attn))


class Transformer(nn.Module):
    """Source ids to encoder states, target ids and encoder states to decoder states.

    The head that turns decoder states into words is not part of it (see `models.composites`).

    Args: config: sizes and choices; both vocabulary sizes must be set.
    Raises: ConfigError: a vocabulary size is missing.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        check_vocabularies(config, "source_vocab_size", "target_vocab_size")
        self.config = config
        self.source_embedding = TokenEmbedding(config.source_vocab_size, config.d_model, scale=config.scale_embedding)
        self.target_embedding = TokenEmbedding(config.target_vocab_size, config.d_model, scale=config.scale_embedding)
        self.source_positions = positions_of_kind(config.positions, config.d_model, config.max_len)
        self.target_positions = positions_of_kind(config.positions, config.d_model, config.max_len)
        self.dropout = Dropout(config.dropout)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the parameters that the config shares."""
        if self.config.tie_embeddings in ("all", "embeddings"):
            self.target_embedding.weight = self.source_embedding.weight

    def encode(
        self,
        source: Int[Tensor, "batch source_len"],
        source_lengths: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch source_len d_model"]:
        """Encode the source (sec. 3.1). Rows are padded on the right; states at padding are undefined."""
        x = self.dropout(low_precision(self.source_positions(self.source_embedding(source))))
        return self.encoder(x, Lengths(source_lengths))  # type: ignore[no-any-return]

    def decode(
        self,
        target: Int[Tensor, "batch target_len"],
        memory: Float[Tensor, "batch source_len d_model"],
        source_lengths: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch target_len d_model"]:
        """Return states from which the head predicts the token after each target position, causally."""
        x = self.dropout(low_precision(self.target_positions(self.target_embedding(target))))
        decoded: Tensor = self.decoder(x, memory, Causal(), Lengths(source_lengths))
        return decoded

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Compute `encode`, then `decode`: (batch, target_len, d_model)."""
        return self.decode(target, self.encode(source, source_lengths), source_lengths)

    def forward_packed(self, batch: PackedBatch) -> Float[Tensor, "1 target_len d_model"]:
        """Compute `forward` of sentences that lie one after the other in one row, and see nothing of one another.

        Rotary positions count through the row, because scores depend on their differences alone.
        """
        source, target, longest = batch.source_starts, batch.target_starts, batch.longest
        with numbered_tokens(source, batch.source_places):
            x = self._packed_input(batch.source, batch.source_places, longest, "source")
            memory = self.encoder(x, Segments(source, source, longest))
        with numbered_tokens(target, batch.target_places):
            x = self._packed_input(batch.target_input, batch.target_places, longest, "target")
            masks = Segments(target, target, longest, causal=True), Segments(target, source, longest)
            decoded: Tensor = self.decoder(x, memory, *masks)
        return decoded

    def _packed_input(self, ids: Tensor, places: Tensor, longest: int, side: Literal["source", "target"]) -> Tensor:
        x: Tensor = getattr(self, f"{side}_embedding")(ids)
        table = getattr(self, f"{side}_positions").rows(0, longest).to(x.device)
        return self.dropout(low_precision((x + F.embedding(places, table)).to(x.dtype)))  # type: ignore[no-any-return]

    def attention_layers(self) -> dict[HeadKind, list[nn.Module]]:
        """Return the attention modules of all layers, by kind, in the order of `config.heads_by_layer`."""
        decoder = [cast(DecoderLayer, layer) for layer in self.decoder.layers]
        return {
            "encoder": [cast(EncoderLayer, layer).self_attn for layer in self.encoder.layers],
            "decoder": [layer.self_attn for layer in decoder],
            "cross": [layer.cross_attn for layer in decoder],
        }

    def start(self, source: Tensor, source_lengths: Tensor) -> DecoderState:
        """Return the state before the first target token: one row per sentence."""
        return self.start_after(self.encode(source, source_lengths), source_lengths)

    def start_after(self, memory: Tensor, source_lengths: Tensor) -> DecoderState:
        """`start` of sources that are encoded already."""
        return self.decoder.start(memory, source_mask(source_lengths, memory.shape[1]))

    def step(
        self, tokens: Int[Tensor, "rows new_len"], state: DecoderState
    ) -> tuple[Float[Tensor, "rows new_len d_model"], DecoderState]:
        """Compute `decode` for the next tokens of every row, with the stored keys and values of earlier ones."""
        step, after = self.prepare_step(tokens, state)
        return self.compute_step(step), after

    def prepare_step(
        self, tokens: Int[Tensor, "rows new_len"], state: DecoderState
    ) -> tuple[PreparedStep, DecoderState]:
        length, new_len = int(state.length), tokens.shape[1]
        layers, after = state.prepare(new_len)
        rotary, dtype = self.decoder.rotary, self.target_embedding.weight.dtype
        step = PreparedStep(
            tokens=tokens,
            positions=self.target_positions.rows(length, new_len).to(tokens.device),
            rotation=None if rotary is None else rotary.rows(length, new_len, dtype),
            layers=layers,
            mask=Causal() if new_len > 1 else None,  # a single new token may attend to all earlier ones
            source_seen=state.source_seen,
            can_compile=new_len == 1 and length > 0 and not self.decoder.needs_weights,
        )
        return step, after

    def compute_step(self, step: PreparedStep) -> Float[Tensor, "rows new_len d_model"]:
        """Return the decoder's states at the new tokens, and write their keys and values into the state."""
        x: Tensor = self.target_embedding(step.tokens)
        x = self.dropout(low_precision((x + step.positions).to(x.dtype)))
        return self.decoder.step(x, step.layers, step.mask, step.memory_mask, step.rotation)


def build(config: TransformerConfig) -> Seq2Seq:
    """Return body and head, with random weights."""
    check_vocabularies(config, "source_vocab_size", "target_vocab_size")
    head = LinearHead(config.d_model, config.target_vocab_size, bias=config.head_bias)
    model = Seq2Seq(Transformer(config), head, config)
    if config.initialisation == "glorot":
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
    return model
