"""Self-attention within chunks of the sequence and their neighbours.

Paper: none of its own; the local layers of trax' and `transformers`' Reformer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.nn.attention.cache import KeyValueCache
from manyheads.nn.attention.masks import check_rows, zero_padding
from manyheads.nn.attention.multi_head import (
    WEIGHING,
    TensorLine,
    heads_fact,
    merge_heads,
    output_tensor,
    split_heads,
    width_of_heads,
)
from manyheads.nn.attention.relative_bias import PENALTY_UNIT, local_slopes
from manyheads.nn.chunking import neighbours, real_chunks
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.attention import masked_softmax
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.layers import Linear, initialise
from manyheads.nn.shapes import Bool, Float, Int, check_rates, explained


def local_attention(
    query: Float[Tensor, "batch heads length head_dim"],
    key: Float[Tensor, "batch heads length head_dim"],
    value: Float[Tensor, "batch heads length value_dim"],
    *,
    chunk_len: int,
    chunks_before: int = 1,
    chunks_after: int = 0,
    causal: bool = True,
    wrap: bool = False,
    penalties: Float[Tensor, "heads distances"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    dropout_rate: float = 0.0,
    weights_hook: Callable[[Tensor], None] | None = None,
) -> Float[Tensor, "batch heads length value_dim"]:
    """Attend from each position to its chunk, including itself, and to neighbouring chunks.

    Args:
        penalties: of each head and distance, from 0 to the largest that a query can see: subtracted from the scores;
            None: scores do not depend on the distance.
        lengths: real positions of each row, padding on the right; None: all.
        wrap: the first and the last chunk are neighbours.
        weights_hook: called with the weights, (batch, heads, chunks, chunk_len, seen), where seen is the number of keys
            in the chunk and its neighbours.

    Returns: zeros for a query that sees no key, and at positions beyond the length of a row.
    Cost: O(length x chunk_len x (chunks_before + 1 + chunks_after)) time and memory.
    """
    length = query.shape[2]
    if length <= chunk_len:
        chunk_len = max(1, length)  # one chunk without neighbours
        chunks_before = chunks_after = 0
    width = max(query.shape[-1], value.shape[-1])
    if weights_hook is None and policy.uses_triton("chunk attention", query, width=width, rate=dropout_rate):
        from manyheads.nn.kernels.triton.chunks import fused_local_attention

        return fused_local_attention(
            query, key, value, penalties, lengths, chunk_len, chunks_before, chunks_after, causal, wrap
        )
    padding = -length % chunk_len
    query, key, value = (_chunks(x, padding, chunk_len) for x in (query, key, value))
    offsets = range(-chunks_before, chunks_after + 1)
    allowed = _visible(length, query.shape[2], chunk_len, offsets, causal, wrap, lengths, query.device)
    scores = torch.matmul(query, _seen(key, offsets).transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if penalties is not None:
        first = offsets.start * chunk_len
        positions = torch.arange(first, first + scores.shape[-1], device=penalties.device)
        penalty = distance_penalty(torch.arange(chunk_len, device=penalties.device), positions, penalties)
        scores = scores - penalty[:, None].to(scores.dtype)
    weights = masked_softmax(scores, allowed)
    if weights_hook is not None:
        weights_hook(weights)
    out = torch.matmul(dropout(weights, dropout_rate), _seen(value, offsets)).flatten(2, 3)[:, :, :length]
    return zero_padding(out, lengths)


def _chunks(x: Tensor, padding: int, chunk_len: int) -> Tensor:
    """(batch, heads, length, width) -> (batch, heads, chunks, chunk_len, width)"""
    padded = F.pad(x, (0, 0, 0, padding))
    return padded.reshape(*x.shape[:2], padded.shape[2] // chunk_len, chunk_len, x.shape[3])


def _seen(chunks: Tensor, offsets: range) -> Tensor:
    """Return each chunk with its neighbours: (batch, heads, chunks, offsets x chunk_len, width)."""
    if len(offsets) == 1:
        return chunks
    return torch.cat([chunks.roll(-offset, dims=2) for offset in offsets], dim=3)


def _visible(
    length: int,
    num_chunks: int,
    chunk_len: int,
    offsets: range,
    causal: bool,
    wrap: bool,
    lengths: Tensor | None,
    device: torch.device,
) -> Bool[Tensor, "batch 1 chunks chunk_len seen"]:
    query = torch.arange(num_chunks * chunk_len, device=device).view(num_chunks, chunk_len, 1)
    numbers = torch.arange(num_chunks, device=device)[:, None] + torch.tensor(list(offsets), device=device)
    within = ((numbers >= 0) & (numbers < num_chunks)) | wrap
    key = (numbers % num_chunks)[..., None] * chunk_len + torch.arange(chunk_len, device=device)
    allowed = within[..., None].expand_as(key).flatten(1)[:, None]
    key = key.flatten(1)[:, None]  # (chunks, 1, seen)
    allowed = allowed & (key < length)
    if causal:
        allowed = allowed & (key <= query)
    allowed = allowed.expand(-1, chunk_len, -1)[None, None]
    return allowed if lengths is None else allowed & (key < lengths[:, None, None, None, None])


def spread_chunks(
    weights: Float[Tensor, "batch heads chunks chunk_len seen"], chunks_before: int, length: int
) -> Float[Tensor, "batch heads length length"]:
    """Return the weights of local attention, which are stored for neighbouring chunks only, over all keys.

    Args: chunks_before: number of neighbours before the own chunk; length: without the padding of the last chunk.
    """
    batch, heads, chunks, chunk_len, seen = weights.shape
    first = -chunks_before if seen > chunk_len else 0  # a short sequence is one chunk without neighbours
    numbers = torch.arange(chunks, device=weights.device)[:, None] + first
    numbers = (numbers + torch.arange(seen // chunk_len, device=weights.device)) % chunks
    keys = numbers[..., None] * chunk_len + torch.arange(chunk_len, device=weights.device)
    keys = keys.flatten(1)[:, None].expand(chunks, chunk_len, seen).expand_as(weights)
    spread = weights.new_zeros(batch, heads, chunks, chunk_len, chunks * chunk_len)
    # Beyond the ends of the sequence a neighbour is another chunk, for which the weights are zero.
    return spread.scatter_add(4, keys, weights).flatten(2, 3)[:, :, :length, :length]


def distance_penalty(
    queries: Int[Tensor, "*rows q_len"], keys: Int[Tensor, "*rows k_len"], penalties: Float[Tensor, "heads distances"]
) -> Float[Tensor, "*rows heads q_len k_len"]:
    """Return the penalty of each pair, which is subtracted from its score.

    Args: queries, keys: their positions. penalties: see `local_attention`; larger distances have the last one.
    """
    distances = (queries[..., :, None] - keys[..., None, :]).abs().to(penalties.device)
    return penalties[:, distances.clamp(max=penalties.shape[1] - 1)].movedim(0, -3)


class LocalSelfAttention(nn.Module):
    """Multi-head self-attention within chunks and their neighbours.

        >>> LocalSelfAttention(16, 4, chunk_len=8)(torch.randn(2, 64, 16)).shape
        torch.Size([2, 64, 16])
        >>> out, weights = LocalSelfAttention(16, 4, chunk_len=8)(torch.randn(20, 16), need_weights=True)
        >>> out.shape, weights.shape, weights[0, 19, :8].sum().item()  # position 19 is in chunk 2, which sees chunk 1
        (torch.Size([20, 16]), torch.Size([4, 20, 20]), 0.0)

    Args:
        d_model: width of input and output.
        num_heads: number of heads.
        head_dim: width of a head; 0: d_model / num_heads.
        chunk_len: number of positions in a chunk.
        chunks_before, chunks_after: number of neighbouring chunks that a query sees.
        causal: no position attends to a later one.
        wrap: the first and the last chunk are neighbours, as in `transformers`.
        sloped: scores fall with the distance; see `local_slopes`.
        train_slopes: with `sloped`, what is subtracted at each distance is trained for each head, and begins as slope x
            distance.
        bias: whether the output projection has a bias; the others never have one.
        dropout: rate on the attention weights, in training.

    Raises: ConfigError: a size is out of range, a causal layer has later chunks, chunks are wrapped and sloped, or
        slopes are trained but not used.
    """

    muon_without_decay: tuple[str, ...] = ("distance_penalties",)
    kind = "local attention"
    inputs = ("Q", "K", "V")
    sees_whole = False

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int = 0,
        *,
        chunk_len: int,
        chunks_before: int = 1,
        chunks_after: int = 0,
        causal: bool = True,
        wrap: bool = False,
        sloped: bool = False,
        train_slopes: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if chunk_len < 1 or chunks_before < 0 or chunks_after < 0:
            raise ConfigError(
                f"chunk_len {chunk_len} must be 1 or more, chunks_before {chunks_before} and chunks_after"
                f" {chunks_after} 0 or more."
            )
        if causal and chunks_after:
            raise ConfigError(f"chunks_after is {chunks_after}, but a causal layer sees no later chunk; set it to 0.")
        if wrap and sloped:
            raise ConfigError("wrap and sloped do not go together: around the end, distances are not defined.")
        if train_slopes and not sloped:
            raise ConfigError("train_slopes is true, but sloped is false, so there is nothing to train; set both.")
        self.num_heads, self.head_dim = num_heads, width_of_heads(d_model, num_heads, head_dim)
        check_rates(dropout=dropout)
        self.sloped = sloped
        self.chunk_len, self.chunks_before, self.chunks_after = chunk_len, chunks_before, chunks_after
        self.causal, self.wrap, self.dropout_rate = causal, wrap, dropout
        inner = self.num_heads * self.head_dim
        self.q_proj = Linear(d_model, inner, bias=False)
        self.k_proj = Linear(d_model, inner, bias=False)
        self.v_proj = Linear(d_model, inner, bias=False)
        self.out_proj = Linear(inner, d_model, bias=bias)
        self.reach = (max(chunks_before, chunks_after) + 1) * chunk_len  # distances are below it
        self.distance_penalties = nn.Parameter(torch.empty(num_heads, self.reach)) if train_slopes else None
        self.weights_hook: Callable[[Tensor], None] | None = None
        self.reset_parameters()

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        chunks = f"chunks of {self.chunk_len:,}: its own, {self.chunks_before} before, {self.chunks_after} after"
        trained = self.distance_penalties is not None
        slopes = "trained penalties for distances" if trained else "scores fall with the distance"
        return self.kind, heads_fact(self), chunks, *([slopes] if self.sloped else [])

    def tensors(self, output: Tensor, seen: Tensor | None, is_cross: bool = False) -> Iterator[TensorLine]:
        """See `MultiHeadAttention.tensors`. No matrix of all weights exists."""
        batch, length, _ = output.shape
        for name in ("queries", "keys", "values"):
            letter = name[0].upper()
            yield name, (batch, self.num_heads, length, self.head_dim), f"{letter} = x W_{letter}, in heads"
        chunks = neighbours(self.chunk_len, self.chunks_before, self.chunks_after)
        slopes = (" - slope |i - j|" if self.distance_penalties is None else " - p(|i - j|)") if self.sloped else ""
        later = ", nothing later" if self.causal else ""
        yield output_tensor(self, output, f"A = softmax(Q Kᵀ / √d_k{slopes}) over {chunks}{later}")

    def operations(self) -> Iterator[tuple[str, str]]:
        """See `MultiHeadAttention.operations`."""
        yield "Cut", neighbours(self.chunk_len, self.chunks_before, self.chunks_after)
        yield "MatMul", "Q Kᵀ"
        yield "Scale", f"1 / √{self.head_dim}"
        if self.sloped:
            what = "slope |i - j|, a slope" if self.distance_penalties is None else "a trained number"
            each = "for each head" if self.distance_penalties is None else "for each head and |i - j|"
            yield "Add distances", f"- {what} {each}"
        yield from WEIGHING
        yield "Join the chunks", ""

    def reset_parameters(self) -> None:
        """Xavier-uniform weights, zero biases; trained penalties begin as slope x distance."""
        initialise(self.q_proj, self.k_proj, self.v_proj, self.out_proj)
        if self.distance_penalties is not None:
            with torch.no_grad():
                self.distance_penalties.copy_(self._slopes_times_distances() / PENALTY_UNIT)

    def penalties(self) -> Float[Tensor, "heads distances"] | None:
        """Return what is subtracted from the scores at each distance; None: nothing."""
        if self.distance_penalties is not None:
            return self.distance_penalties * PENALTY_UNIT
        return self._slopes_times_distances() if self.sloped else None

    def _slopes_times_distances(self) -> Float[Tensor, "heads distances"]:
        device = self.q_proj.weight.device
        return local_slopes(self.num_heads).to(device)[:, None] * torch.arange(self.reach, device=device)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (split_heads(proj(x), self.num_heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    @explained
    def forward(
        self,
        x: Float[Tensor, "*batch length d_model"],
        *,
        lengths: Int[Tensor, "*batch"] | None = None,
        need_weights: bool = False,
    ) -> Float[Tensor, "*batch length d_model"] | tuple[Tensor, Tensor]:
        """Attend among the positions of x; see `local_attention`.

        Args:
            x: (batch, length, d_model), or one sequence without a batch, (length, d_model).
            need_weights: also return the attention weights before dropout.

        Returns: (batch, length, d_model), and with `need_weights` (batch, heads, length, length). Without a batch axis
            if x has none.
        Raises: ShapeError: x has neither two nor three axes.
        """
        if x.dim() not in (2, 3):
            raise ShapeError(f"x of shape {tuple(x.shape)} must be (batch, length, d_model), or (length, d_model).")
        alone = x.dim() == 2
        if lengths is not None and not alone:
            check_rows(lengths.shape[0], x.shape[0], "lengths")
        if alone:
            x, lengths = x[None], None if lengths is None else lengths[None]
        seen: list[Tensor] = []
        out = self._finish(self._attend(*self._project(x), lengths, seen.append if need_weights else None))
        if not need_weights:
            return out[0] if alone else out
        return (out[0], seen[0][0]) if alone else (out, seen[0])

    def _finish(self, attended: Tensor) -> Tensor:
        out: Tensor = self.out_proj(merge_heads(attended))
        return out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, show: Callable[[Tensor], None] | None
    ) -> Tensor:
        hooks = [hook for hook in (self.weights_hook, show) if hook is not None]

        def shown(weights: Tensor) -> None:
            weights = spread_chunks(weights, self.chunks_before, q.shape[2])
            for hook in hooks:
                hook(weights)

        return local_attention(
            q,
            k,
            v,
            chunk_len=self.chunk_len,
            chunks_before=self.chunks_before,
            chunks_after=self.chunks_after,
            causal=self.causal,
            wrap=self.wrap,
            penalties=self.penalties(),
            lengths=lengths,
            dropout_rate=self.dropout_rate if self.training else 0.0,
            weights_hook=shown if hooks else None,
        )

    def start(self, rows: int) -> KeyValueCache:
        """Return an empty cache for `step`.

        Raises: RequestError: the layer is not causal, so earlier outputs depend on later tokens.
        """
        if not self.causal:
            raise RequestError(
                "a bidirectional layer cannot be cached, because outputs depend on later tokens; use a causal layer."
            )
        return KeyValueCache.empty(rows, self.num_heads, self.head_dim, self.q_proj.weight)

    def step(
        self,
        x: Float[Tensor, "rows new_len d_model"],
        cache: KeyValueCache,
        lengths: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows new_len d_model"], KeyValueCache]:
        """Attend from new positions to themselves and to earlier ones, as `forward` does on the whole sequence.

        The cache is consumed.
        Args: lengths: real new positions of each row, padding on the right; None: all.
        Cost: O(chunk_len x (chunks_before + 1)) per token.
        """
        q, k, v = self._project(x)
        parts = []
        for some, real in real_chunks(x.shape[1], self.chunk_len, lengths):
            out, cache = self._extended(q[:, :, some], k[:, :, some], v[:, :, some], cache, real)
            parts.append(out)
        return self._finish(torch.cat(parts, dim=2)), cache

    def _extended(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache, lengths: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        count, kept, before = q.shape[2], (self.chunks_before + 1) * self.chunk_len, cache.row_lengths()[:, None]
        (step,), cache = cache.prepare(count, k.dtype, kept)
        keys, values = step.write(k, v).filled()
        # positions: (rows, columns + new_len); begin, the first position that a query sees: (rows, new_len)
        positions = before + torch.arange(-step.length, count, device=q.device)
        new = positions[:, step.length :]
        begin = (new // self.chunk_len - self.chunks_before) * self.chunk_len
        allowed = (positions[:, None] >= begin.clamp(min=0)[..., None]) & (positions[:, None] <= new[..., None])
        scores = torch.matmul(q, keys.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        penalties = self.penalties()
        if penalties is not None:
            scores = scores - distance_penalty(new, positions, penalties).to(scores.dtype)
        out = torch.matmul(masked_softmax(scores, allowed[:, None]), values)
        return zero_padding(out, lengths), cache.after(count, lengths, kept)
