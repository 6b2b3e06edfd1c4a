"""The language model of Radford et al. 2019 (GPT-2), top to bottom: a Transformer's decoder without a source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from manyheads.errors import RequestError
from manyheads.models.composites import LanguageModel, check_evaluates, check_lanes, check_marks
from manyheads.models.size_checks import check_vocabularies
from manyheads.nn.attention.cache import CacheStep, KeyValueCache
from manyheads.nn.attention.masks import Causal, Dense, Mask, dense_mask
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.layers import Dropout, FeedForward, Residual, build_norm
from manyheads.nn.positions import RotaryPositions, TokenEmbedding, positions_of_kind
from manyheads.nn.pytrees import State, register_state

if TYPE_CHECKING:
    from manyheads.models.decoder.config import DecoderConfig
    from manyheads.nn.shapes import Bool, Float, Int


@register_state
@dataclass(frozen=True)
class TextState(State):
    """What is kept of texts. positions (lanes,): tokens read, if there is a cache; cache: None: nothing is kept."""

    positions: Tensor
    cache: KeyValueCache | None = None

    def reset(self, lanes: Bool[Tensor, " lanes"]) -> TextState:
        """Forget the texts of the lanes marked True. Raises: ShapeError: not one mark per lane."""
        check_marks(lanes, len(self.positions))
        lanes = lanes.to(self.positions.device)
        return TextState(self.positions.masked_fill(lanes, 0), self.cache and self.cache.reset(lanes))

    def reorder(self, rows: Int[Tensor, "*rows"]) -> TextState:
        """See `protocols.SearchState.reorder`."""
        rows = rows.flatten()
        return TextState(self.positions.index_select(0, rows), self.cache and self.cache.reorder(rows))


@dataclass(frozen=True)
class TextStep:
    """The arguments of `Decoder.compute_step`; see `protocols.PreparesSteps`.

    Shape: positions (new_len, d_model), rotation (new_len, head_dim), both with a lanes axis if lengths differ.
    """

    tokens: Tensor
    positions: Tensor
    rotation: Tensor | None
    layers: tuple[CacheStep, ...]
    mask: Mask | None
    can_compile: bool

    @property
    def kind(self) -> tuple[object, ...]:
        return self.layers[0].key.dtype, len(self.tokens) == 1, self.mask is None, self.positions.dim()

    def for_compiler(self) -> TextStep:
        # Copies, because a compiler distinguishes views that begin elsewhere and tensors of inference mode.
        rotation = None if self.rotation is None else self.rotation.clone()
        return replace(self, tokens=self.tokens.clone(), positions=self.positions.clone(), rotation=rotation)


class DecoderLayer(nn.Module):
    """Masked self-attention, then feed-forward. Shape: (lanes, len, d_model) in and out."""

    def __init__(self, config: DecoderConfig, rotary: RotaryPositions | None = None) -> None:
        super().__init__()
        self.self_attn = MultiHeadAttention(
            config.d_model,
            config.num_heads,
            head_dim=config.width_of_heads,
            dropout=config.attention_dropout,
            bias=config.bias,
            num_kv_heads=config.num_kv_heads or None,
            rotary=rotary,
        )
        self.feed_forward = FeedForward.of(config, config.d_ff)
        self.self_attn_residual = Residual.of(config)
        self.feed_forward_residual = Residual.of(config)

    def forward(
        self, x: Tensor, past: CacheStep | None = None, mask: Mask | None = None, rotation: Tensor | None = None
    ) -> Tensor:
        """Args: past: of a step, which mask and rotation belong to; None: whole texts, causally."""

        def attend(h: Tensor) -> Tensor:
            return self.self_attn(h, mask=Causal())[0] if past is None else self.self_attn.step(h, past, mask, rotation)

        x = self.self_attn_residual(x, attend)
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token ids to hidden states. Raises: ConfigError: the vocabulary size is missing."""

    traced_parts: ClassVar = {"norm": ("hidden states", "LN(x)")}
    prepares_steps = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        check_vocabularies(config, "vocab_size")
        self.config = config
        self.embedding = TokenEmbedding(config.vocab_size, config.d_model, scale=config.scale_embedding)
        self.positions = positions_of_kind(config.positions, config.d_model, config.max_len)
        self.dropout = Dropout(config.dropout)
        self.rotary = RotaryPositions.of(config, config.width_of_heads)
        self.layers = nn.ModuleList(DecoderLayer(config, self.rotary) for _ in range(config.num_layers))
        norm = build_norm(config.norm, config.d_model, config.norm_eps, config.bias)
        self.norm = norm if config.norm_position == "pre" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as GPT-2: N(0, 0.02), and what is added to the residual stream N(0, 0.02 / sqrt(2 num_layers))."""
        if not self.config.scale_embedding:
            nn.init.normal_(self.embedding.weight, std=0.02)
        added = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.layers.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=added if name.endswith("out_proj.weight") else 0.02)

    def tie_weights(self) -> None:
        """Do nothing: the body shares no parameter within itself."""

    def tie_head(self, head: Any) -> None:
        """See `protocols.LanguageBody`."""
        if self.config.tie_embeddings:
            head.weight = self.embedding.weight

    @property
    def max_len(self) -> int | None:
        return self.config.longest_input

    def start(self, lanes: int, attending: Any = None, *, projected: bool = True) -> TextState:
        """Return the empty state. Raises: RequestError: `attending` is given, but a token attends to all before it."""
        if attending is not None:
            raise RequestError("a decoder attends to all that it has read; leave the memory length out.")
        like = next(self.parameters())
        positions = torch.zeros(lanes, dtype=torch.int64, device=like.device)
        empty = [cast(DecoderLayer, one).self_attn.empty_cache(lanes, like) for one in self.layers]
        return TextState(positions, KeyValueCache.of_layers(empty) if projected else None)

    def forward(
        self,
        tokens: Int[Tensor, "lanes len"],
        lengths: Int[Tensor, " lanes"] | None = None,
        state: TextState | None = None,
        *,
        first_positions: Int[Tensor, " lanes"] | None = None,
    ) -> tuple[Float[Tensor, "lanes len d_model"], TextState]:
        """Read texts, or the next part of them where the state keeps what was read; see `protocols.LanguageBody`.

        Args: first_positions: of each lane's first token, for a state without a cache; None: 0.
        Raises: ShapeError: the state has other lanes, or the text is longer than the learned positions.
            RequestError: a state with a cache, in training or with first_positions.
        """
        if state is None:
            state = self.start(tokens.shape[0], projected=False)
        check_lanes(tokens.shape[0], len(state.positions), "state")
        if tokens.numel() == 0:
            return next(self.parameters()).new_empty(*tokens.shape, self.config.d_model), state
        if state.cache is not None:
            if first_positions is not None:
                raise RequestError("a state with a cache counts its positions itself; leave first_positions out.")
            step, after = self.prepare_step(tokens, state)
            hidden = self.compute_step(step)
            if lengths is not None:  # the padding's keys are written by now, and forgotten
                read = state.positions + lengths
                after = TextState(read, cast(KeyValueCache, after.cache).truncate(read))
            return hidden, after
        x = self.positions(self.embedding(tokens), 0 if first_positions is None else first_positions)
        x = self.dropout(low_precision(x))
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None else self.norm(x), state

    def prepare_step(self, tokens: Int[Tensor, "lanes new_len"], state: TextState) -> tuple[TextStep, TextState]:
        """See `protocols.PreparesSteps`. Raises: RequestError: in training."""
        check_evaluates(self, "a state with a cache")
        new_len, before = tokens.shape[1], cast(KeyValueCache, state.cache)
        most = int(before.length)
        first = most if before.lengths is None else state.positions
        layers, cache = before.prepare(new_len, low_precision(self.embedding(tokens[:0])).dtype)
        mask: Mask | None = Causal() if new_len > 1 else None  # a single new token may attend to all earlier ones
        slots = layers[0].slots
        if slots.padding is not None:  # computed once for all layers
            seen = dense_mask(layers[0].among_real(mask), new_len, slots.end - slots.first, tokens.device, slots.length)
            mask = None if seen is None else Dense(seen)
            layers = tuple(replace(one, slots=replace(one.slots, padding=None)) for one in layers)
        step = TextStep(
            tokens,
            self.positions.rows(first, new_len, most).to(tokens.device),
            None if self.rotary is None else self.rotary.rows(first, new_len, self.embedding.weight.dtype, most),
            layers,
            mask,
            can_compile=new_len == 1 < slots.length and not any(one.self_attn.needs_weights for one in self.layers),  # type: ignore[union-attr]
        )
        return step, TextState(state.positions + new_len, cache.after(new_len))

    def compute_step(self, step: TextStep) -> Float[Tensor, "lanes new_len d_model"]:
        """Return the hidden states at the new tokens, and write their keys and values behind the stored ones."""
        x: Tensor = self.embedding(step.tokens)
        x = self.dropout(low_precision((x + step.positions).to(x.dtype)))
        for layer, past in zip(self.layers, step.layers, strict=True):
            x = layer(x, past, step.mask, step.rotation)
        return x if self.norm is None else self.norm(x)


def build(config: DecoderConfig) -> LanguageModel:
    """Return body and head, with random weights."""
    return LanguageModel(Decoder(config), LinearHead(config.d_model, config.vocab_size, bias=config.head_bias), config)
