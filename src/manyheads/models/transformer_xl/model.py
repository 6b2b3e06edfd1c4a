"""The Transformer-XL, top to bottom.

Paper: Dai et al. 2019, "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context", arXiv:1901.02860.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from manyheads.errors import RequestError
from manyheads.models.composites import LanguageModel, check_evaluates, check_lanes
from manyheads.models.size_checks import HeadKind, check_vocabularies
from manyheads.models.transformer_xl.config import Attending, TransformerXLConfig
from manyheads.models.transformer_xl.state import LayerInputs, XLState, XLStep
from manyheads.nn.attention.cache import CacheStep, KeyValueCache
from manyheads.nn.attention.masks import Causal, KeyPadding, Mask, NeverEmpty, Window
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import DistanceEncoding, LearnedRelativeAttention, RelativeAttention
from manyheads.nn.heads.adaptive import AdaptiveEmbedding, AdaptiveHead
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.layers import Dropout, FeedForward, Residual, build_norm

if TYPE_CHECKING:
    from manyheads.nn.shapes import Float, Int


class RelativeLayer(nn.Module):
    """Attention by content and distance over memory and segment, then feed-forward.

    Paper: Dai et al. 2019, the summary at the end of sec. 3.3. Symbols: h = x, m = memory, in which nothing has a
        gradient; keys and values are those of m followed by h, queries those of h.
    Args: index: number of the layer, from 0.

    Shape: (lanes, len, d_model) in and out.
    """

    def __init__(self, config: TransformerXLConfig, index: int = 0) -> None:
        super().__init__()
        self.attention = _relative_attention(config, config.heads_by_layer()["decoder"][index])
        self.feed_forward = FeedForward(config.d_model, config.d_ff, dropout=config.dropout)
        self.attention_residual = _residual(config)
        self.feed_forward_residual = _residual(config)

    def forward(
        self,
        x: Float[Tensor, "lanes len d_model"],
        memory: Float[Tensor, "lanes columns d_model"] | None,
        distances: Tensor,
        mask: Mask | None,
    ) -> Float[Tensor, "lanes len d_model"]:
        """Args: memory: this layer's input at earlier positions. distances: as `project_positions` takes them."""
        memory = _seen_as(self.attention_residual, memory)
        x = self.attention_residual(x, lambda h: self.attention(h, memory, distances, mask))
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]

    def extend(
        self,
        x: Float[Tensor, "lanes len d_model"],
        past: CacheStep,
        positions: Tensor,
        distance_bias: Tensor | None,
        mask: Mask | None,
    ) -> Float[Tensor, "lanes len d_model"]:
        """`forward` with stored keys and values.

        Args:
            past: keys and values of the memory, to which those of the segment are added.
            positions, distance_bias: projected, one column per key.
        """

        def attend(h: Tensor) -> Tensor:
            q, k, v = self.attention.project_together(h)
            return self.attention.attend(q, *past.write(k, v).filled(), positions, distance_bias, mask)

        x = self.attention_residual(x, attend)
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class AbsoluteLayer(nn.Module):
    """Attention over memory and segment as in the Transformer, then feed-forward. Shape: (lanes, len, d_model).

    Shape: positions (max_len, d_model), if they are trained: by increasing distance from the segment's last token.
    Args: index: number of the layer, from 0.
    """

    without_decay: tuple[str, ...] = ("positions",)

    def __init__(self, config: TransformerXLConfig, index: int = 0) -> None:
        super().__init__()
        heads, width = config.heads_by_layer()["decoder"][index], config.width_of_heads
        rate = config.attention_dropout
        self.attention = MultiHeadAttention(config.d_model, heads, head_dim=width, dropout=rate, bias=False)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, dropout=config.dropout)
        self.attention_residual = _residual(config)
        self.feed_forward_residual = _residual(config)
        learned = config.attention == "absolute_learned"
        self.positions = nn.Parameter(torch.empty(config.max_len, config.d_model)) if learned else None
        if self.positions is not None:
            nn.init.normal_(self.positions, std=0.02)

    def forward(
        self,
        x: Float[Tensor, "lanes len d_model"],
        memory: Float[Tensor, "lanes columns d_model"] | None,
        positions: Tensor | None,
        mask: Mask | None,
    ) -> Float[Tensor, "lanes len d_model"]:
        """Args: memory: this layer's input at earlier positions, as it was before positions were added to it.

        positions: addends of memory and x, (columns + len, d_model), or with a leading lanes axis; for trained
            positions their distances from the segment's last token, whole numbers; None: nothing is added.
        """
        if positions is not None:
            if self.positions is not None:
                positions = self.positions[positions.clamp(max=self.positions.shape[0] - 1)]
            split = positions.shape[-2] - x.shape[1]
            x = (x + positions[..., split:, :]).to(x.dtype)
            memory = None if memory is None else (memory + positions[..., :split, :]).to(memory.dtype)
        memory = _seen_as(self.attention_residual, memory)

        def attend(h: Tensor) -> Tensor:
            key = h if memory is None else torch.cat([memory, h], dim=1)
            out: Tensor = self.attention(h, key=key, mask=mask)[0]
            return out

        x = self.attention_residual(x, attend)
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


def _relative_attention(config: TransformerXLConfig, heads: int) -> RelativeAttention:
    sizes = (config.d_model, heads, config.width_of_heads)
    if config.attention != "relative_learned":
        bias = None
        if config.relative_bias:
            from manyheads.nn.attention.relative_bias import RelativeBias

            bias = RelativeBias(heads, config.relative_bias, causal=True)
        return RelativeAttention(*sizes, dropout=config.attention_dropout, relative_bias=bias)
    return LearnedRelativeAttention(*sizes, max_len=config.max_len, dropout=config.attention_dropout)


def _seen_as(residual: Residual, memory: Tensor | None) -> Tensor | None:
    """Return the memory as the sublayer reads its input: normalised under pre-norm."""
    if memory is None or residual.position == "post":
        return memory
    seen: Tensor = residual.norm(memory)
    return seen


def _residual(config: TransformerXLConfig) -> Residual:
    norm = build_norm("layer", config.d_model, config.norm_eps)
    return Residual(norm, position=config.norm_position, dropout=config.dropout)


class TransformerXL(nn.Module):
    """Segments of token ids and a memory of what came before to hidden states and the memory for the next segment.

    The head that turns hidden states into words is not part of it (see `models.composites`).

    `hidden_states` is the model of the paper. Two other ways compute the same for generation: `prepare_step` and
    `compute_step`, with stored keys and values; and `_read_again`, for models with absolute positions that were trained
    without memory.

    Args: config: sizes and choices; the vocabulary size must be set.
    Raises: ConfigError: the vocabulary size is missing.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        check_vocabularies(config, "vocab_size")
        self.config = config
        self.embedding = AdaptiveEmbedding(
            config.vocab_size,
            config.d_model,
            cutoffs=config.cutoffs,
            d_embed=config.embedding_dim,
            div_value=config.div_value,
        )
        self.dropout = Dropout(config.dropout)
        layer = RelativeLayer if config.attention.startswith("relative") else AbsoluteLayer
        self.layers = nn.ModuleList(layer(config, index) for index in range(config.num_layers))
        self.encoding = None if config.attention.endswith("learned") else DistanceEncoding(config.d_model)
        self.reset_parameters()
        self.tie_weights()

    def reset_parameters(self) -> None:
        """Initialise as in the official code: N(0, 0.02), embedding projections N(0, 0.01), norm gains N(1, 0.02)."""
        self.embedding.reset_parameters()
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, mean=1.0, std=0.02)

    def tie_weights(self) -> None:
        """Tie u of all layers, and v, if the config says so."""
        if not (self.config.share_biases and self.config.attention == "relative"):
            return
        first, *others = (cast(RelativeAttention, layer.attention) for layer in self.layers)
        for other in others:
            other.content_bias, other.position_bias = first.content_bias, first.position_bias

    def attention_layers(self) -> dict[HeadKind, list[nn.Module]]:
        """Return the attention modules of all layers, in the order of `config.heads_by_layer`."""
        return {"decoder": [cast(nn.Module, layer.attention) for layer in self.layers]}

    def tie_head(self, head: Any) -> None:
        """Tie the parameters that the config shares between embedding and head."""
        if self.config.tie_embeddings:
            head.tie_tables(self.embedding.tables)
        for index, tied in enumerate(self.config.tie_projections):
            if tied:
                theirs = self.embedding.projections
                assert theirs is not None  # the config checks this
                head.projections[index] = theirs[min(index, len(theirs) - 1)]

    @property
    def max_len(self) -> int | None:
        """Longest sequence; None: there is no limit."""
        return None

    def start(self, lanes: int, attending: Attending | None = None, *, projected: bool = True) -> XLState:
        """Return the memory before the first segment: empty, or with `initial_memory: zeros` full of zeros.

        Args:
            lanes: sequences read side by side.
            attending: context settings from now on; None: those of training, with `projected` without ext_len, because
                each token is then given once.
            projected: keep keys and values in place of hidden states, for evaluation and generation. Kinds with
                absolute positions, which change as tokens age, keep hidden states nevertheless; those of them that were
                trained without memory keep tokens and read them again.
        """
        if attending is None:
            attending = self.config.attending
            attending = replace(attending, ext_len=0) if projected else attending
        like = next(self.parameters())
        columns = attending.memory_len if attending.initial_memory == "zeros" else 0
        lengths = torch.full((lanes,), columns, dtype=torch.int64, device=like.device)
        num_layers = len(self.layers)
        if projected and self.config.attention.startswith("relative"):
            heads, width = self.config.heads_by_layer()["decoder"], self.config.width_of_heads
            zeros = [like.new_zeros(lanes, count, columns, width) for count in heads]
            return XLState(KeyValueCache.of(zeros, zeros), attending)
        if projected and not self.config.memory_len and attending.memory_len:
            # Passes of memory_len tokens; one of them is new.
            tokens = LayerInputs((lengths.new_empty(lanes, 0),), lengths)
            return XLState(tokens, Attending(memory_len=attending.memory_len - 1, clamp_len=attending.clamp_len))
        inputs = (like.new_zeros(lanes, columns, self.config.d_model),) * num_layers
        return XLState(LayerInputs(inputs, lengths), attending)

    def forward(
        self,
        tokens: Int[Tensor, "lanes len"],
        lengths: Int[Tensor, " lanes"] | None = None,
        state: XLState | None = None,
        *,
        memory_len: int | None = None,
    ) -> tuple[Float[Tensor, "lanes len d_model"], XLState]:
        """Read a segment (sec. 3.2).

        Args:
            tokens: the next ids of every lane.
            lengths: number of real ids, padding on the right; None: all are real.
            state: the previous state, which is consumed; None: empty.
            memory_len: attend to this number of positions in memory only, as a model with that memory_len; the next
                state has all of them. For a state that stores hidden states (`projected=False`). None: all.

        Returns: states from which a head predicts the token after each, undefined at padding; and the state for the
            next segment.
        Raises: ShapeError: the state has other lanes. RequestError: stored keys and values in training, or with
            memory_len.
        """
        if state is None:
            state = self.start(tokens.shape[0], projected=False)
        check_lanes(tokens.shape[0], state.lanes, "memory")
        if tokens.shape[1] == 0:
            return next(self.parameters()).new_empty(*tokens.shape, self.config.d_model), state
        if memory_len is not None and (isinstance(state.memory, KeyValueCache) or state.memory.are_tokens):
            raise RequestError("memory_len is for training; give `start` the context settings of an evaluation.")
        if isinstance(state.memory, KeyValueCache):
            step, state = self._prepare(tokens, state)
            return self.compute_step(step), state.after(tokens.shape[1], lengths)
        if state.memory.are_tokens:
            return self._read_again(tokens, lengths, state)
        seen = state if memory_len is None else state.recent(memory_len)
        hidden = self.hidden_states(tokens, lengths, seen)
        return self.dropout(hidden[-1]), state.after(tokens.shape[1], lengths, hidden[:-1])

    def hidden_states(
        self,
        tokens: Int[Tensor, "lanes len"],
        lengths: Int[Tensor, " lanes"] | None,
        state: XLState,
    ) -> list[Float[Tensor, "lanes len d_model"]]:
        """Return the input of every layer, and the output of the last: num_layers + 1 tensors.

        Args: state: with `LayerInputs` of every layer.
        """
        x = self.dropout(low_precision(self.embedding(tokens)))
        mask = self._mask(state, tokens.shape[1])
        positions = self._positions(state, tokens.shape[1], lengths, x)
        hidden = [x]
        memories = cast(LayerInputs, state.memory).layers
        for layer, memory in zip(self.layers, memories, strict=True):
            x = layer(x, memory.to(x.dtype) if state.columns else None, positions, mask)
            hidden.append(x)
            if self.config.attention == "absolute":
                positions = None  # positions are added at the input only
        return hidden

    def _read_again(self, tokens: Tensor, lengths: Tensor | None, state: XLState) -> tuple[Tensor, XLState]:
        """`forward` on stored tokens.

        A new token sees at least half a pass of tokens; a single new token sees a whole pass.
        """
        longest = state.attending.memory_len + 1
        lengths = torch.full_like(tokens[:, 0], tokens.shape[1]) if lengths is None else lengths
        empty = self.start(tokens.shape[0], Attending(clamp_len=state.attending.clamp_len), projected=False)
        parts = []
        for new in torch.split(tokens, max(1, longest // 2), dim=1):
            added, lengths = lengths.clamp(max=new.shape[1]), (lengths - new.shape[1]).clamp(min=0)
            # What a lane keeps depends on its own new tokens, not on those of other lanes.
            kept = state.lengths.minimum(longest - added)
            columns = torch.arange(state.columns + new.shape[1], device=tokens.device)
            real = (columns >= state.columns - kept[:, None]) & (columns < state.columns + added[:, None])
            order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
            read = torch.cat([*cast(LayerInputs, state.memory).layers, new], dim=1).gather(1, order)
            hidden = self.hidden_states(read, kept + added, empty)[-1]
            columns = (kept[:, None] + torch.arange(new.shape[1], device=tokens.device)).clamp(max=read.shape[1] - 1)
            parts.append(hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[2])))
            state = state.after(new.shape[1], added, (new,))
        return self.dropout(torch.cat(parts, dim=1)), state

    @property
    def prepares_steps(self) -> bool:
        """See `protocols.PreparesSteps`: with relative attention, and one table that holds all tokens."""
        return self.config.attention.startswith("relative") and len(self.embedding.tables) == 1

    def prepare_step(self, tokens: Int[Tensor, "lanes new_len"], state: XLState) -> tuple[XLStep, XLState]:
        step, state = self._prepare(tokens, state)
        return step, state.after(tokens.shape[1], None)

    def compute_step(self, step: XLStep) -> Float[Tensor, "lanes new_len d_model"]:
        """Return the hidden states at the new tokens, and write their keys and values behind the stored ones."""
        x = self.dropout(low_precision(self.embedding(step.tokens)))
        mask = None if step.seen is None else NeverEmpty(step.seen)
        for index, layer in enumerate(cast(list[RelativeLayer], list(self.layers))):
            positions, bias = step.distances(index)
            x = layer.extend(x, step.layers[index], positions, bias, mask)
        return x  # type: ignore[no-any-return]

    def _prepare(self, tokens: Tensor, state: XLState) -> tuple[XLStep, XLState]:
        """Return a step, and the state with space for the new positions, before they count.

        Raises: RequestError: in training.
        """
        check_evaluates(self, "a memory of keys and values")
        new_len = tokens.shape[1]
        like = low_precision(self.embedding(tokens[:0]))
        layers, memory = cast(KeyValueCache, state.memory).prepare(new_len, like.dtype, state.attending.memory_len)
        state = self._reaching(replace(state, memory=memory), new_len + 2, like)  # two more: see `XLStep`
        step = XLStep(
            tokens=tokens,
            layers=layers,
            positions=state.positions,
            distance_biases=state.distance_biases,
            seen=None if (mask := self._mask(state, new_len)) is None else mask.pattern,
            can_compile=new_len == 1 and state.columns > 1 and not self._needs_weights,
        )
        return step, state

    @property
    def _needs_weights(self) -> bool:
        """Whether some layer must compute its attention weights."""
        return any(cast(RelativeLayer, layer).attention.weights_hook is not None for layer in self.layers)

    def _reaching(self, state: XLState, new_len: int, like: Tensor) -> XLState:
        """Return the state with distances projected for all its positions and a segment."""
        needed = state.columns + new_len
        if state.reach >= needed and state.positions[0].dtype == like.dtype:
            return state
        reach = min(max(2 * needed, 16), max(needed, state.attending.memory_len + new_len))
        encoded = self._encoded(distances_back(reach, state.attending.clamp_len, like.device), reach, like)
        projected = [cast(RelativeLayer, layer).attention.project_positions(encoded) for layer in self.layers]
        biases = tuple(bias.to(like.dtype) for _, bias in projected if bias is not None)
        positions = tuple(one.to(like.dtype).contiguous() for one, _ in projected)
        return replace(state, positions=positions, distance_biases=biases)

    def _mask(self, state: XLState, new_len: int) -> NeverEmpty | None:
        """Return the mask of memory and segment for the segment's queries, computed once for all layers.

        None: one query that sees all.
        """
        valid = state.valid()
        if new_len == 1 and state.attending.window is None and valid is None:
            return None
        mask: Mask = Causal()
        if state.attending.window is not None:
            mask = mask & Window(left=state.attending.window, right=None)
        if valid is not None:
            mask = mask & KeyPadding(torch.cat([valid, valid.new_ones(len(valid), new_len)], dim=1))
        keys = torch.arange(state.columns + new_len, device=state.memory.device)
        return NeverEmpty(mask.allowed(keys[state.columns :], keys))

    def _positions(self, state: XLState, new_len: int, lengths: Tensor | None, like: Tensor) -> Tensor | None:
        """Return the positions of memory and segment, in the form that the kind of attention needs."""
        k_len, clamp_len = state.columns + new_len, state.attending.clamp_len
        if self.config.attention.startswith("relative") or lengths is None:
            distances = distances_back(k_len, clamp_len, like.device)
        else:  # a lane's positions count back from its own last token
            steps = torch.arange(k_len, device=like.device)
            distances = (state.columns - 1 + lengths[:, None] - steps).clamp(min=0, max=clamp_len)
        return self._encoded(distances, k_len, like)

    def _encoded(self, distances: Tensor, k_len: int, like: Tensor) -> Tensor:
        """Return the distances: unchanged for tables of trained vectors, otherwise encoded."""
        if self.encoding is None:
            return distances
        encoded: Tensor = self.encoding(distances, k_len - 1).to(like.dtype)
        return self.dropout(encoded, shared=encoded.dim() == 2)  # type: ignore[no-any-return]


def distances_back(k_len: int, clamp_len: int | None, device: torch.device) -> Tensor:
    """Return the distance from the last query to each key: (k_len,), farthest first, whole numbers in every type."""
    distances = torch.arange(k_len - 1, -1, -1, device=device)
    return distances if clamp_len is None else distances.clamp(max=clamp_len)


def build(config: TransformerXLConfig) -> LanguageModel:
    """Return body and head, with random weights. The head clusters the vocabulary if the config has cutoffs."""
    check_vocabularies(config, "vocab_size")
    head: LinearHead | AdaptiveHead
    if config.cutoffs or config.has_projections:
        head = AdaptiveHead(
            config.vocab_size,
            config.d_model,
            cutoffs=config.cutoffs,
            d_embed=config.embedding_dim,
            div_value=config.div_value,
        )
    else:
        head = LinearHead(config.d_model, config.vocab_size, bias=True)
        nn.init.normal_(head.weight, std=0.02)
    return LanguageModel(TransformerXL(config), head, config)
