"""Attention that knows how far away a key is, not where it stands: what lets hidden states be used again as memory.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 3.3. The score of query i and key j is

    ((q_i + u) . k_j + (q_i + v) . r_(i - j)) / sqrt(head_dim)

with q, k projections of hidden states, r a projection of the encoding of a distance, u and v trained. Its terms (a) and
(c) are u's part and q's part of the first product, (b) and (d) q's part and v's part of the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from manyheads.errors import ConfigError, ShapeError
from manyheads.nn.attention.masks import Causal, Mask, dense_mask
from manyheads.nn.attention.multi_head import merge_heads, split_heads
from manyheads.nn.attention.softmax import masked_softmax, some_row_is_empty
from manyheads.nn.dropout import dropout, scaled_mask
from manyheads.nn.positions import sinusoidal_table

__all__ = [
    "DistanceEncoding",
    "LearnedRelativeAttention",
    "RelativeAttention",
    "relative_attention",
    "relative_shift",
    "relative_weights",
]

# Scores worked on at once on a CPU: those of a few lanes, which stay in a core's own cache from the product that makes
# them to the one that uses them.
_TILE_NUMBERS = 1 << 18


def relative_shift(x: Float[Tensor, "*batch q_len k_len"]) -> Float[Tensor, "*batch q_len k_len"]:
    """Row i moved left by q_len - 1 - i places, by pad and view alone.

    Paper: Dai et al. 2019, appendix B. In: column t belongs to distance k_len - 1 - t. Out: column j belongs to key j,
    where the queries are the last q_len of the k_len positions. What comes in from the next row belongs to keys after
    the query, which no causal mask allows.
    """
    *batch, q_len, k_len = x.shape
    padded = F.pad(x, (1, 0)).view(*batch, k_len + 1, q_len)
    return padded[..., 1:, :].reshape(*batch, q_len, k_len)


def relative_weights(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    positions: Float[Tensor, "heads k_len head_dim"],
    content_bias: Float[Tensor, "heads head_dim"],
    position_bias: Float[Tensor, "heads head_dim"] | None,
    distance_bias: Float[Tensor, "heads k_len"] | None = None,
    mask: Mask | None = None,
) -> Float[Tensor, "batch heads q_len k_len"]:
    """The attention weights themselves, before dropout; see `relative_attention`.

    By plain autograd, which makes the (batch, heads, q_len, k_len) numbers several times over: the fast path's oracle.
    """
    _check(query, key, positions)
    q_len, k_len = query.shape[2], key.shape[2]
    content = torch.matmul(query + content_bias[:, None].to(query.dtype), key.transpose(-1, -2))
    asking = query if position_bias is None else query + position_bias[:, None].to(query.dtype)
    by_distance = torch.matmul(asking, positions.transpose(-1, -2))
    if distance_bias is not None:
        by_distance = by_distance + distance_bias[:, None].to(by_distance.dtype)
    scores = (content + relative_shift(by_distance)) / math.sqrt(query.shape[-1])
    allowed = dense_mask(Causal() & mask, q_len, k_len, query.device, k_len - q_len)
    return masked_softmax(scores, allowed)


def relative_attention(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    value: Float[Tensor, "batch heads k_len value_dim"],
    positions: Float[Tensor, "heads num_distances head_dim"],
    content_bias: Float[Tensor, "heads head_dim"],
    position_bias: Float[Tensor, "heads head_dim"] | None,
    distance_bias: Float[Tensor, "heads k_len"] | None = None,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Weighted sum of the values, weights by content and distance; causal whatever the mask.

    Paper: Dai et al. 2019, sec. 3.3. Symbols: u = content_bias, v = position_bias.
    Args:
        query: of the last q_len of the k_len positions.
        positions: row t is r of distance k_len - 1 - t: in the keys' order, as the last query sees them.
        position_bias: None for the learned kind, whose r stand for themselves.
        distance_bias: a trained score of every distance, in the order of `positions`.
        mask: what else is hidden: a window, padding.
        dropout_rate: on the weights; 0 outside training.

    Returns: zeros for a query that may attend to nothing.
    Raises: ShapeError: more queries than keys, or not one row of `positions` a key.
    Cost: O(q_len x k_len) numbers a head and lane are kept for the backward pass once, none without gradients; never
        (q_len, k_len, head_dim).
    """
    _check(query, key, positions)
    q_len, k_len = query.shape[2], key.shape[2]
    if torch.compiler.is_compiling():  # compilers fuse theirs, and do not see through ours
        weights = relative_weights(query, key, positions, content_bias, position_bias, distance_bias, mask)
        return torch.matmul(dropout(weights, dropout_rate), value)
    allowed = dense_mask(Causal() & mask, q_len, k_len, query.device, k_len - q_len)
    given = [query, key, value, positions, content_bias, position_bias, distance_bias]
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if not keeps:
        given = [None if t is None else t.detach() for t in given]
    out: Tensor = _RelativeAttention.apply(*given, allowed, dropout_rate, keeps)  # type: ignore[no-untyped-call]
    return out


def _check(query: Tensor, key: Tensor, positions: Tensor) -> None:
    if query.shape[2] > key.shape[2]:
        raise ShapeError(f"{query.shape[2]} queries cannot be the last of {key.shape[2]} positions.")
    if positions.shape[1] != key.shape[2]:
        raise ShapeError(f"{positions.shape[1]} encoded distances do not fit {key.shape[2]} keys; give one a key.")


def _tiles(batch: int, numbers_each: int, device: torch.device) -> Iterator[slice]:
    """Lanes to work on at once."""
    step = max(1, _TILE_NUMBERS // max(1, numbers_each)) if device.type == "cpu" else max(1, batch)
    return (slice(first, min(first + step, batch)) for first in range(0, batch, step))


def _shifted(by_distance: Tensor) -> Tensor:
    """`relative_shift` as a view. by_distance: (heads, lanes, q_len, k_len), contiguous -> (lanes, heads, q_len, k_len)

    In memory, row i + 1 begins k_len numbers after row i and is to move one place less: a step of k_len - 1 does it.
    """
    heads, lanes, q_len, k_len = by_distance.shape
    strides = (q_len * k_len, lanes * q_len * k_len, k_len - 1, 1)
    return by_distance.as_strided((lanes, heads, q_len, k_len), strides, by_distance.storage_offset() + q_len - 1)


def _unshifted(shifted: Tensor) -> Tensor:
    """The transpose of `_shifted` for gradients, which are zero at keys after the query.

    Shape: (lanes, heads, q_len, k_len) -> (heads, lanes, q_len, k_len).
    """
    lanes, heads, q_len, k_len = shifted.shape
    flat = shifted.new_empty(heads, lanes, q_len * k_len)
    flat[..., : q_len - 1] = 0
    # The last column of all rows but the last belongs to keys after the query; the rest lies in one piece.
    flat[..., q_len - 1 : -1].view(heads, lanes, q_len, k_len - 1).copy_(shifted[..., :-1].transpose(0, 1))
    flat[..., -1] = shifted[:, :, -1, -1].t()
    return flat.view(heads, lanes, q_len, k_len)


class _RelativeAttention(torch.autograd.Function):
    """A few lanes at a time, so that scores stay in cache; keeps the weights and nothing else of their size."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        content_bias: Tensor,
        position_bias: Tensor | None,
        distance_bias: Tensor | None,
        allowed: Tensor,
        rate: float,
        keeps: bool,
    ) -> Tensor:
        compute, positions_dtype = query.dtype, positions.dtype
        batch, heads, q_len, head_dim = query.shape
        k_len = key.shape[2]
        scale = 1 / math.sqrt(head_dim)
        with torch.autocast(query.device.type, enabled=False):
            # The scale is taken into the small side: q_len x head_dim numbers in place of q_len x k_len.
            by_content = _biased(query, content_bias, scale)
            by_position = _biased(query, position_bias, scale)
            key, value, positions = key.to(compute), value.to(compute), positions.to(compute)
            key_columns = key.transpose(-1, -2)
            place_columns = positions.transpose(-1, -2)
            hidden = torch.zeros(allowed.shape, dtype=compute, device=query.device)
            hidden.masked_fill_(~allowed, -torch.inf)
            empty_rows = some_row_is_empty(allowed)
            out = query.new_empty(batch, heads, q_len, value.shape[-1])
            weights = query.new_empty(batch, heads, q_len, k_len) if keeps else None
            kept = query.new_empty(batch, heads, q_len, k_len) if keeps and rate else None
            for lanes in _tiles(batch, heads * q_len * k_len, query.device):
                asking = by_position[lanes].transpose(0, 1).flatten(1, 2)
                by_distance = torch.bmm(asking, place_columns).view(heads, -1, q_len, k_len)
                if distance_bias is not None:
                    by_distance += (distance_bias * scale).to(compute)[:, None, None]
                scores = query.new_empty(by_distance.shape[1], heads, q_len, k_len)
                torch.add(_shifted(by_distance), hidden[lanes] if hidden.shape[0] > 1 else hidden, out=scores)
                _flat(scores).baddbmm_(_flat(by_content[lanes]), _flat(key_columns[lanes]))
                # In float32 inside, whatever the scores' type.
                tile = torch.softmax(scores, dim=-1, out=None if weights is None else weights[lanes])
                if empty_rows:
                    tile.masked_fill_(~(allowed[lanes] if allowed.shape[0] > 1 else allowed), 0.0)
                if rate:
                    tile_kept = scaled_mask(tile, rate)
                    tile = tile * tile_kept
                    if kept is not None:
                        kept[lanes] = tile_kept
                torch.bmm(_flat(tile), _flat(value[lanes]), out=_flat(out[lanes]))
        if keeps:
            ctx.save_for_backward(by_content, by_position, key, value, positions, weights, kept)
            ctx.scale = scale
            ctx.dtypes = [None if t is None else t.dtype for t in (content_bias, position_bias, distance_bias)]
            ctx.positions_dtype = positions_dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        by_content, by_position, key, value, positions, weights, kept = ctx.saved_tensors
        content_dtype, position_dtype, distance_dtype = ctx.dtypes
        batch, heads, q_len, k_len = weights.shape
        statistics = torch.promote_types(weights.dtype, torch.float32)
        grad_content, grad_position = torch.empty_like(by_content), torch.empty_like(by_position)
        grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
        grad_positions = torch.zeros_like(positions, dtype=statistics)
        grad_distance = torch.zeros(heads, k_len, dtype=statistics, device=key.device) if distance_dtype else None
        with torch.autocast(key.device.type, enabled=False):
            grad_out = grad_out.to(weights.dtype)
            for lanes in _tiles(batch, heads * q_len * k_len, key.device):
                tile, grad = weights[lanes], _flat(grad_out[lanes])
                grad_tile = torch.bmm(grad, _flat(value[lanes]).transpose(-1, -2)).view_as(tile)
                used = tile
                if kept is not None:
                    grad_tile *= kept[lanes]
                    used = tile * kept[lanes]
                torch.bmm(_flat(used).transpose(-1, -2), grad, out=_flat(grad_value[lanes]))
                grad_scores = torch._softmax_backward_data(grad_tile, tile, -1, tile.dtype)
                flat = _flat(grad_scores)
                torch.bmm(flat, _flat(key[lanes]), out=_flat(grad_content[lanes]))
                torch.bmm(flat.transpose(-1, -2), _flat(by_content[lanes]), out=_flat(grad_key[lanes]))
                by_distance = _unshifted(grad_scores).flatten(1, 2)  # (heads, lanes x q_len, k_len)
                grad_asking = torch.bmm(by_distance, positions).view(heads, -1, q_len, positions.shape[-1])
                grad_position[lanes] = grad_asking.transpose(0, 1)
                asking = by_position[lanes].transpose(0, 1).flatten(1, 2)
                grad_positions += torch.bmm(by_distance.transpose(-1, -2), asking)
                if grad_distance is not None:
                    grad_distance += by_distance.sum(dim=1, dtype=statistics)

            def of_bias(grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
                return None if dtype is None else (grad.sum(dim=(0, 2), dtype=statistics) * ctx.scale).to(dtype)

            grad_query = (grad_content + grad_position) * ctx.scale
            return (
                grad_query,
                grad_key,
                grad_value,
                grad_positions.to(ctx.positions_dtype),
                of_bias(grad_content, content_dtype),
                of_bias(grad_position, position_dtype),
                None if grad_distance is None else (grad_distance * ctx.scale).to(distance_dtype),
                None,
                None,
                None,
            )


def _biased(query: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """(query + bias) * scale, contiguous, rounded once."""
    out = query.new_empty(query.shape)
    if bias is None:
        return torch.mul(query, scale, out=out)
    return torch.add((bias * scale).to(query.dtype)[:, None], query, alpha=scale, out=out)


def _flat(x: Tensor) -> Tensor:
    """Lanes and heads as one axis."""
    return x.reshape(-1, *x.shape[2:])


class DistanceEncoding(nn.Module):
    """Sinusoidal encodings of whole distances, in float32 whatever the compute type.

    Distances are integers and stay so: as bfloat16 numbers, 601 of them would be 407 different ones.
    Paper: Dai et al. 2019, sec. 3.3: R, with all sines before all cosines as in the official code.
    Args: d_model: width.
    """

    table: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        # A cache, not a limit; see `nn.positions.SinusoidalPositions`.
        self.register_buffer("table", self._rows(0 if torch.get_default_device().type == "meta" else 512), False)

    def _rows(self, count: int, device: torch.device | None = None) -> Tensor:
        return sinusoidal_table(torch.arange(float(count), device=device), self.d_model, "halves")

    def forward(self, distances: Int[Tensor, "*shape"], longest: int) -> Float[Tensor, "*shape d_model"]:
        """Args: longest: no distance is above it; said, so that nobody has to look."""
        if longest >= self.table.shape[0] or self.table.dtype != torch.float32:
            self.table = self._rows(max(512, 1 << longest.bit_length()), self.table.device)
        return F.embedding(distances, self.table)


class RelativeAttention(nn.Module):
    """Self-attention in several heads, by content and distance, over a memory and what follows it.

    Paper: Dai et al. 2019, sec. 3.3. Symbols: W_q, W_k,E, W_v = q_proj, k_proj, v_proj; W_k,R = position_proj; u, v =
        content_bias, position_bias.
    Args:
        d_model: width of input and output.
        num_heads, head_dim: heads and their width; their product need not be d_model.
        dropout: rate on the attention weights, in training.

    To share u and v among layers, assign the parameters.
    """

    def __init__(self, d_model: int, num_heads: int, head_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if min(d_model, num_heads, head_dim) < 1:
            raise ConfigError(f"d_model {d_model}, num_heads {num_heads} and head_dim {head_dim} must be at least 1.")
        self.num_heads, self.head_dim = num_heads, head_dim
        self.dropout_rate = dropout
        inner = num_heads * head_dim
        self.q_proj = nn.Linear(d_model, inner, bias=False)
        self.k_proj = nn.Linear(d_model, inner, bias=False)
        self.v_proj = nn.Linear(d_model, inner, bias=False)
        self.out_proj = nn.Linear(inner, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self._make_position_parameters(d_model)
        self.weights_hook: Callable[[Tensor], None] | None = None
        self.reset_parameters()

    def _make_position_parameters(self, d_model: int) -> None:
        self.position_proj = nn.Linear(d_model, self.num_heads * self.head_dim, bias=False)
        self.position_bias: nn.Parameter | None = nn.Parameter(torch.empty(self.num_heads, self.head_dim))

    def reset_parameters(self) -> None:
        """N(0, 0.02): the official code."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def project_positions(self, places: Float[Tensor, "k_len d_model"]) -> tuple[Tensor, Tensor | None]:
        """r of every distance, once for all lanes. places: encodings, farthest first.

        Returns: (heads, k_len, head_dim), and a score of each distance (heads, k_len), which this kind has not.
        """
        return self.position_proj(places).unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, 1), None

    def project_query(self, x: Tensor) -> Tensor:
        """(batch, q_len, d_model) -> (batch, heads, q_len, head_dim)"""
        return split_heads(self.q_proj(x), self.num_heads)

    def project_memory(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of memory and segment in one product: (batch, k_len, d_model) -> two of (batch, heads, k_len,
        head_dim).
        """
        if x.shape[0] * x.shape[1] < self.head_dim * self.num_heads:
            # Joining the weights would cost more than the product saves: a step of generation.
            k, v = self.k_proj(x), self.v_proj(x)
        else:
            k, v = F.linear(x, torch.cat([self.k_proj.weight, self.v_proj.weight])).chunk(2, dim=-1)
        return split_heads(k, self.num_heads), split_heads(v, self.num_heads)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, distance_bias: Tensor | None, mask: Mask | None
    ) -> Float[Tensor, "batch q_len d_model"]:
        """Attention over projected heads, merged and projected out; see `relative_attention`."""
        rate = self.dropout_rate if self.training else 0.0
        parts = (positions, self.content_bias, self.position_bias, distance_bias)
        if self.weights_hook is None:
            attended = relative_attention(q, k, v, *parts, mask, rate)
        else:
            weights = relative_weights(q, k, *parts, mask)
            self.weights_hook(weights)
            attended = torch.matmul(dropout(weights, rate), v)
        out: Tensor = self.out_proj(merge_heads(attended))
        return out

    def forward(
        self,
        x: Float[Tensor, "batch q_len d_model"],
        memory: Float[Tensor, "batch memory_len d_model"] | None,
        places: Tensor,
        mask: Mask | None = None,
    ) -> Float[Tensor, "batch q_len d_model"]:
        """Attend from every position of x to the memory and to x up to itself.

        Args:
            memory: what stands before x, already normalised where x is.
            places: see `project_positions`; one row a position of memory and x together.
            mask: what else is hidden, over memory and x.
        """
        k, v = self.project_memory(x if memory is None else torch.cat([memory, x], dim=1))
        return self.attend(self.project_query(x), k, v, *self.project_positions(places), mask)


class LearnedRelativeAttention(RelativeAttention):
    """Relative attention with a trained key and a trained score for every distance and head.

    Shaw et al. 2018, arXiv:1803.02155, in the form of the official Transformer-XL's attention type 1.
    Args: max_len: distances that are told apart; from max_len - 1 on all are one.

    Shape: distance_embedding (max_len, heads, head_dim), distance_bias (max_len, heads), by rising distance.
    """

    def __init__(self, d_model: int, num_heads: int, head_dim: int, *, max_len: int, dropout: float = 0.0) -> None:
        self.max_len = max_len
        super().__init__(d_model, num_heads, head_dim, dropout=dropout)

    def _make_position_parameters(self, d_model: int) -> None:
        self.position_bias = None
        self.distance_embedding = nn.Parameter(torch.empty(self.max_len, self.num_heads, self.head_dim))
        self.distance_bias = nn.Parameter(torch.empty(self.max_len, self.num_heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.distance_bias)

    def project_positions(self, places: Int[Tensor, " k_len"]) -> tuple[Tensor, Tensor | None]:
        """Rows of the tables. places: distances, farthest first."""
        rows = places.clamp(max=self.max_len - 1)
        return self.distance_embedding[rows].transpose(0, 1), self.distance_bias[rows].t()
