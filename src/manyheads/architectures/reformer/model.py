"""The Reformer, top to bottom.

Paper: Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.architectures.reformer.config import ReformerConfig
from manyheads.architectures.reformer.layers import AttentionSublayer, Call, FeedForwardSublayer, ReformerLayer
from manyheads.architectures.reformer.state import ReformerState, seed_tensor
from manyheads.architectures.size_checks import check_vocabularies
from manyheads.errors import RequestError, ShapeError
from manyheads.nn.chunking import chunk_slices
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.kernels.reversible import recomputed, through_sublayers
from manyheads.nn.layers import Dropout
from manyheads.nn.positions import AxialPositions, TokenEmbedding, positions_of_kind
from manyheads.nn.shapes import Float, Int

# Positions whose streams are joined at once if the config gives no chunk length.
_JOINED = 4096


class Reformer(nn.Module):
    """Token ids to hidden states of width 2 d_model, both streams side by side.

    The head that turns hidden states into words is not part of it (see `architectures.language_model`).

    Args: config: sizes and choices; the vocabulary size must be set.
    Raises: ConfigError: the vocabulary size is missing.
    """

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
        if tokens.shape[0] != len(state.positions):
            raise ShapeError(
                f"{tokens.shape[0]} rows of tokens do not fit a state of {len(state.positions)} lanes; start a new one,"
                " or reorder it."
            )
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
        if self.training or torch.is_grad_enabled():
            raise RequestError(
                "a state with caches has no gradient, so it serves evaluation only; use model.eval() and"
                " torch.no_grad(), or start(..., projected=False)."
            )
        x1 = x2 = self.embed(tokens, state.positions)
        caches = []
        for (attention, feed_forward), cache in zip(self._pairs(), state.caches, strict=True):
            added, cache = attention.step(x2, cache, lengths)
            x1 = x1 + added
            x2 = x2 + feed_forward(x1)[0]
            caches.append(cache)
        return self._joined(x1, x2), state.after(tokens.shape[1], lengths, tuple(caches))

    def embed(
        self, tokens: Int[Tensor, "lanes len"], first_position: int | Int[Tensor, " lanes"] = 0
    ) -> Float[Tensor, "lanes len d_model"]:
        """Return the embeddings of the tokens with their positions, if the model has positions."""
        x: Tensor = self.embedding(tokens)
        return x if self.positions is None else self.positions(x, first_position)

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
