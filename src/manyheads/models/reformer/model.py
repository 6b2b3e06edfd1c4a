"""The Reformer, top to bottom. Its layers' two sublayers are F, attention of one kind or another, and G, feed-forward.

Paper: Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451; the layers: sec. 3, eq. 7 and 9:
y1 = x1 + F(x2), y2 = x2 + G(y1), with norm and dropout inside F and G.

The state between calls is the seed of the hashes, and in generation the caches of earlier tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import RequestError
from manyheads.models.composites import LanguageModel, check_evaluates, check_lanes, check_marks
from manyheads.models.size_checks import check_vocabularies
from manyheads.nn.attention.cache import KeyValueCache
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.lsh_cache import LSHCache
from manyheads.nn.chunking import chunk_slices
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.kernels.reversible import recomputed, through_sublayers
from manyheads.nn.layers import Dropout, FeedForward
from manyheads.nn.positions import AxialPositions, TokenEmbedding, positions_of_kind
from manyheads.nn.pytrees import State, register_state
from manyheads.seeding import derive_seed

if TYPE_CHECKING:
    from manyheads.models.reformer.config import LayerKind, ReformerConfig, ReformerSeq2SeqConfig
    from manyheads.nn.shapes import Bool, Float, Int

Cache = LSHCache | KeyValueCache


@register_state
@dataclass(frozen=True)
class ReformerState(State):
    """The state of a Reformer; see `Reformer.start`.

    Shape: hash_seed () int64 on the CPU: seed of the next training call's rotations; positions (lanes,) int64: number
        of tokens read, if there are caches; caches: one per layer; empty: every call begins a new sequence.
    """

    hash_seed: Tensor
    positions: Tensor
    caches: tuple[Cache, ...] = ()

    def with_next_seed(self) -> ReformerState:
        """Return the state for the next training call. Consecutive seeds are hashed before they are used."""
        return replace(self, hash_seed=(self.hash_seed + 1) & (2**63 - 1))

    def after(self, new_len: int, lengths: Tensor | None, caches: tuple[Cache, ...]) -> ReformerState:
        """Return the state after new_len more tokens, of which `lengths` are real in each lane."""
        return replace(self, positions=self.positions + (new_len if lengths is None else lengths), caches=caches)

    def reset(self, lanes: Bool[Tensor, " lanes"]) -> ReformerState:
        """Empty the caches of the lanes marked True. The hash seed is kept.

        Raises: ShapeError: the number of marks differs from the number of lanes.
        """
        check_marks(lanes, len(self.positions))
        lanes = lanes.to(self.positions.device)
        caches = tuple(cache.reset(lanes) for cache in self.caches)
        return replace(self, positions=self.positions.masked_fill(lanes, 0), caches=caches)

    def reorder(self, rows: Int[Tensor, "*rows"]) -> ReformerState:
        """Return the lanes with these ids, in this order; see `protocols.SearchState.reorder`."""
        rows = rows.flatten()
        caches = tuple(cache.reorder(rows) for cache in self.caches)
        return replace(self, positions=self.positions.index_select(0, rows), caches=caches)


def seed_tensor(seed: int) -> Tensor:
    """Return a hash seed as a state stores it."""
    return torch.tensor(seed, dtype=torch.int64, device="cpu")


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
    reads_float32 = ("norm",)

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
        if self.kind == "local":
            return self.dropout(self.self_attn(h, lengths=call.lengths)), ()
        num_hashes = 0 if self.kind == "full" else call.num_hashes
        out, kept = cast(LSHSelfAttention, self.self_attn).forward_keeping(
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
        if self.kind == "local":
            return cast(LocalSelfAttention, self.self_attn).start(rows)
        return cast(LSHSelfAttention, self.self_attn).start(
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
    reads_float32 = ("norm",)

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


# Positions whose streams are joined at once if the config gives no chunk length.
_JOINED = 4096


class Reformer(nn.Module):
    """Token ids to hidden states of width 2 d_model, both streams side by side.

    The head that turns hidden states into words is not part of it (see `models.composites`).

    Args: config: sizes and choices; the vocabulary size must be set.
    Raises: ConfigError: the vocabulary size is missing.
    """

    reads_float32 = ("norm",)
    traced_parts: ClassVar = {"norm": ("hidden states", "LN([x₁, x₂]), the two streams side by side")}

    def __init__(self, config: ReformerConfig) -> None:
        super().__init__()
        check_vocabularies(config, "vocab_size")
        self.config = config
        self.embedding = TokenEmbedding(config.vocab_size, config.d_model, scale=False)
        self.positions = _positions_of(config)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(ReformerLayer(config, index) for index in range(config.num_layers))
        self.norm = nn.LayerNorm(2 * config.d_model, eps=config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise embeddings with N(0, 0.02), as positions; the other modules initialise themselves."""
        nn.init.normal_(self.embedding.weight, std=0.02)

    def tie_weights(self) -> None:
        """Do nothing: the body shares no parameter within itself."""

    def tie_head(self, head: nn.Module) -> None:
        """Do nothing: the head reads twice the embedding's width, so they share no parameter."""

    @property
    def max_len(self) -> int | None:
        """Longest sequence; None: there is no limit."""
        return self.config.longest_input

    def start(
        self, lanes: int, attending: Any = None, *, projected: bool = True, hash_seed: int | None = None
    ) -> ReformerState:
        """Return the empty state.

        Args:
            lanes: sequences read side by side.
            attending: must be None: the context length of a layer is part of its config.
            projected: keep caches for generation, in evaluation mode only; False: every call begins a new sequence,
                and passes on the hash seed only.
            hash_seed: seed of the first training call; None: the config's, which evaluation always uses.

        Raises: RequestError: `attending` is given; or caches are wanted, but a layer's outputs depend on later tokens
            (visible 'chunk', or not causal).
        """
        if attending is not None:
            raise RequestError("the context length of a Reformer is part of its config; leave the memory length out.")
        like = next(self.parameters())
        state = ReformerState(
            hash_seed=seed_tensor(self.config.hash_seed if hash_seed is None else hash_seed),
            positions=torch.zeros(lanes, dtype=torch.int64, device=like.device),
        )
        if not projected:
            return state
        call = Call(None, self.config.hash_seed, is_shared=self.config.shared_rotations)
        return state.after(0, None, tuple(attention.start(lanes, call) for attention, _ in self._pairs()))

    def forward(
        self,
        tokens: Int[Tensor, "lanes len"],
        lengths: Int[Tensor, " lanes"] | None = None,
        state: ReformerState | None = None,
        *,
        num_hashes: int | None = None,
        rotations: Mapping[int, Tensor] | None = None,
        first_positions: Int[Tensor, " lanes"] | None = None,
    ) -> tuple[Float[Tensor, "lanes len width"], ReformerState]:
        """Read a sequence, or the next part of one where the state keeps what was read (sec. 3).

        Args:
            tokens: ids of every lane.
            lengths: number of real ids, padding on the right; None: all are real. Results at padding are undefined.
            state: see `start`; it is consumed.
            num_hashes: hash rounds; None: the config's; 0: exact attention.
            rotations: layer index -> rotations to use in place of those that the seed gives.
            first_positions: position of the first token of each lane; None: 0. For a state without caches, since
                caches count the positions themselves.

        Returns: states from which a head predicts the token after each (of an encoder: the token itself), of width
            2 d_model; and the state for the next call, in training with another hash seed.
        Raises: ShapeError: the state has other lanes, or the sequence is longer than the positions.
            RequestError: a state with caches, in training or with first_positions.
        """
        if state is None:
            state = self.start(tokens.shape[0], projected=False)
        check_lanes(tokens.shape[0], len(state.positions), "state")
        if tokens.numel() == 0:
            return next(self.parameters()).new_empty(*tokens.shape, 2 * self.config.d_model), state
        if state.caches:
            if first_positions is not None:
                raise RequestError("a state with caches counts its positions itself; leave first_positions out.")
            return self._extend(tokens, lengths, state)
        length, rest = tokens.shape[1], self.config.padding(tokens.shape[1])
        if rest:
            lengths = torch.full_like(state.positions, length) if lengths is None else lengths
            tokens = F.pad(tokens, (0, rest))
        # The streams stay in float32 under autocast, so that subtraction restores what was added.
        first = 0 if first_positions is None else first_positions
        streams = [self.dropout(self.embed(tokens, first))] * 2
        seed = int(state.hash_seed) if self.training else self.config.hash_seed
        call = Call(lengths, seed, num_hashes, rotations or {}, self.config.shared_rotations)
        sublayers = [sublayer for pair in self._pairs() for sublayer in pair]
        streams = [*through_sublayers(sublayers, streams.pop(), streams.pop(), call, reversible=self.config.reversible)]
        joined = self._joined(*(stream[:, :length] for stream in streams))
        return joined, state.with_next_seed() if self.training else state

    def _extend(self, tokens: Tensor, lengths: Tensor | None, state: ReformerState) -> tuple[Tensor, ReformerState]:
        """`forward` with caches: only the new tokens' keys, values and buckets are computed."""
        check_evaluates(self, "a state with caches")
        # The host knows where the longest lane is, and need not wait for a device to say it.
        past = state.caches[0].past if isinstance(state.caches[0], LSHCache) else state.caches[0]
        most = int(past.length)
        x1 = x2 = self.embed(tokens, most if past.lengths is None else state.positions, most)
        caches = []
        for (attention, feed_forward), cache in zip(self._pairs(), state.caches, strict=True):
            added, cache = attention.step(x2, cache, lengths)
            x1 = x1 + added
            x2 = x2 + feed_forward(x1)[0]
            caches.append(cache)
        return self._joined(x1, x2), state.after(tokens.shape[1], lengths, tuple(caches))

    def embed(
        self,
        tokens: Int[Tensor, "lanes len"],
        first_position: int | Int[Tensor, " lanes"] = 0,
        most: int | None = None,
    ) -> Float[Tensor, "lanes len d_model"]:
        """Return the embeddings of the tokens with their positions, if the model has positions.

        Args: most: an upper bound of the first positions, which are then not read.
        """
        x: Tensor = self.embedding(tokens)
        return x if self.positions is None else self.positions(x, first_position, most)

    def _pairs(self) -> list[tuple[AttentionSublayer, FeedForwardSublayer]]:
        return [(layer.attention, layer.feed_forward) for layer in cast(list[ReformerLayer], list(self.layers))]

    def _joined(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Return both streams side by side, as the head reads them; under autocast in its type."""

        def join(*pieces: Tensor) -> Tensor:
            return low_precision(self.dropout(self.norm(torch.cat(pieces, dim=-1))))

        chunk_len = self.config.ff_chunk_len or _JOINED
        if self.config.reversible:
            return recomputed(join, (x1, x2), (self.norm, self.dropout), chunk_len)
        return torch.cat([join(x1[:, part], x2[:, part]) for part in chunk_slices(x1.shape[1], chunk_len)], dim=1)


def _positions_of(config: ReformerConfig) -> nn.Module | None:
    if config.positions == "none":
        return None
    if config.positions == "axial":
        return AxialPositions(*config.axes)
    return positions_of_kind(config.positions, config.d_model, config.max_len)


def build(config: ReformerConfig) -> LanguageModel:
    """Return the language model's body and head, with random weights. The body returns both residual streams."""
    check_vocabularies(config, "vocab_size")
    head = LinearHead(2 * config.d_model, config.vocab_size, bias=True)
    return LanguageModel(Reformer(config), head, config)
