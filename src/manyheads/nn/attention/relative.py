"""Attention that knows how far away a key is, not where it stands: what lets hidden states be used again as memory.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 3.3. The score of query i and key j is

    ((q_i + u) . k_j + (q_i + v) . r_(i - j)) / sqrt(head_dim)

with q, k projections of hidden states, r a projection of the encoding of a distance, u and v trained. Its terms (a) and
(c) are u's part and q's part of the first product, (b) and (d) q's part and v's part of the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from manyheads.errors import ConfigError, ShapeError
from manyheads.nn.attention.masks import Causal, Mask, dense_mask
from manyheads.nn.attention.multi_head import biased_projections, merge_heads, split_heads
from manyheads.nn.attention.softmax import masked_softmax, some_row_is_empty, weighted_by_sums
from manyheads.nn.compiling import compiles_a_step
from manyheads.nn.dropout import RowMasks, dropout
from manyheads.nn.linear import Linear, Packed, linear, product, product_of_rows
from manyheads.nn.positions import sinusoidal_table

__all__ = [
    "DistanceEncoding",
    "LearnedRelativeAttention",
    "RelativeAttention",
    "relative_attention",
    "relative_shift",
    "relative_shift_both_ways",
    "relative_weights",
]

# Scores worked on at once on a CPU: those of a few lanes, which stay in the cores' own caches from the product that
# makes them to the one that uses them. Fewer cost more calls, in which one thread waits for the other.
_TILE_NUMBERS = 1 << 19


def relative_shift(x: Float[Tensor, "*batch q_len k_len"]) -> Float[Tensor, "*batch q_len k_len"]:
    """Row i moved left by q_len - 1 - i places, by pad and view alone.

        >>> relative_shift(torch.tensor([[2.0, 1, 0], [2, 1, 0]])).tolist()  # distances of the last two of three places
        [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0]]

    Paper: Dai et al. 2019, appendix B. In: column t belongs to distance k_len - 1 - t. Out: column j belongs to key j,
    where the queries are the last q_len of the k_len positions. What comes in from the next row belongs to keys after
    the query, which no causal mask allows.
    """
    *batch, q_len, k_len = x.shape
    padded = F.pad(x, (1, 0)).view(*batch, k_len + 1, q_len)
    return padded[..., 1:, :].reshape(*batch, q_len, k_len)


def relative_shift_both_ways(x: Float[Tensor, "*batch q_len num_distances"]) -> Float[Tensor, "*batch q_len k_len"]:
    """`relative_shift` where keys after the query count too.

    In: column t belongs to distance k_len - 1 - t, which falls to -(q_len - 1): there are k_len + q_len - 1 of them.
    """
    *batch, q_len, num_distances = x.shape
    # In memory, row i + 1 begins num_distances numbers after row i and is to move one place less.
    moved = x.reshape(*batch, q_len * num_distances)[..., q_len - 1 : q_len * num_distances - 1]
    return moved.view(*batch, q_len, num_distances - 1)[..., : num_distances - q_len + 1] if q_len > 1 else x


def relative_weights(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    positions: Float[Tensor, "heads num_distances head_dim"],
    content_bias: Float[Tensor, "heads head_dim"],
    position_bias: Float[Tensor, "heads head_dim"] | None,
    distance_bias: Float[Tensor, "heads num_distances"] | None = None,
    mask: Mask | None = None,
    causal: bool = True,
) -> Float[Tensor, "batch heads q_len k_len"]:
    """The attention weights themselves, before dropout; see `relative_attention`.

    By plain autograd, which makes the (batch, heads, q_len, k_len) numbers several times over: the fast path's oracle.
    """
    _check(query, key, positions, causal)
    q_len, k_len = query.shape[2], key.shape[2]
    content = torch.matmul(query + content_bias[:, None].to(query.dtype), key.transpose(-1, -2))
    asking = query if position_bias is None else query + position_bias[:, None].to(query.dtype)
    by_distance = torch.matmul(asking, positions.transpose(-1, -2))
    if distance_bias is not None:
        by_distance = by_distance + distance_bias[:, None].to(by_distance.dtype)
    by_position = relative_shift(by_distance) if causal else relative_shift_both_ways(by_distance)
    scores = (content + by_position) / math.sqrt(query.shape[-1])
    allowed = dense_mask(Causal() & mask if causal else mask, q_len, k_len, query.device, k_len - q_len)
    return masked_softmax(scores, allowed)


def relative_attention(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    value: Float[Tensor, "batch heads k_len value_dim"],
    positions: Float[Tensor, "heads num_distances head_dim"],
    content_bias: Float[Tensor, "heads head_dim"],
    position_bias: Float[Tensor, "heads head_dim"] | None,
    distance_bias: Float[Tensor, "heads num_distances"] | None = None,
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    causal: bool = True,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Weighted sum of the values, weights by content and distance; causal whatever the mask, or both ways.

    Paper: Dai et al. 2019, sec. 3.3. Symbols: u = content_bias, v = position_bias.
    Args:
        query: of the last q_len of the k_len positions.
        positions: row t is r of distance k_len - 1 - t: in the keys' order, as the last query sees them. k_len rows;
            both ways k_len + q_len - 1, whose last belong to keys after the query.
        position_bias: None for the learned kind, whose r stand for themselves.
        distance_bias: a trained score of every distance, in the order of `positions`.
        mask: what else is hidden: a window, padding.
        dropout_rate: on the weights; 0 outside training.
        causal: no query sees a later key; False lets it, if the mask does.

    Returns: zeros for a query that may attend to nothing.
    Raises: ShapeError: more queries than keys and causal, or not as many rows of `positions` as there are distances.
    Cost: O(q_len x k_len) numbers a head and lane are kept for the backward pass once, none without gradients; never
        (q_len, k_len, head_dim). Both ways, they are kept several times.
    """
    _check(query, key, positions, causal)
    q_len, k_len = query.shape[2], key.shape[2]
    if compiles_a_step() and q_len == 1 and query.device.type == "cpu":
        return _by_sums(query, key, value, positions, content_bias, position_bias, distance_bias, mask)
    # Compilers fuse theirs, and do not see through ours; both ways there is no path of our own.
    if torch.compiler.is_compiling() or not causal:
        weights = relative_weights(query, key, positions, content_bias, position_bias, distance_bias, mask, causal)
        return torch.matmul(dropout(weights, dropout_rate), value)
    allowed = dense_mask(Causal() & mask, q_len, k_len, query.device, k_len - q_len)
    given = [query, key, value, positions, content_bias, position_bias, distance_bias]
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if not keeps:
        given = [None if t is None else t.detach() for t in given]
    out: Tensor = _RelativeAttention.apply(*given, allowed, dropout_rate, keeps)  # type: ignore[no-untyped-call]
    return out


def _check(query: Tensor, key: Tensor, positions: Tensor, causal: bool) -> None:
    q_len, k_len = query.shape[2], key.shape[2]
    if causal and q_len > k_len:
        raise ShapeError(f"{q_len} queries cannot be the last of {k_len} positions.")
    if causal and positions.shape[1] != k_len:
        raise ShapeError(f"{positions.shape[1]} encoded distances do not fit {k_len} keys; give one a key.")
    if not causal and positions.shape[1] != k_len + q_len - 1:
        raise ShapeError(
            f"{positions.shape[1]} encoded distances do not fit {q_len} queries and {k_len} keys; both ways there are"
            f" {k_len + q_len - 1} distances."
        )


def _by_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    content_bias: Tensor,
    position_bias: Tensor | None,
    distance_bias: Tensor | None,
    mask: Mask | None,
) -> Tensor:
    """`relative_attention` of the last position alone for a compiler, in float32 at least: see `weighted_by_sums`.

    Its distances already stand in the order of the keys, so there is nothing to shift.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scale, k_len = 1 / math.sqrt(query.shape[-1]), key.shape[2]
    asks = query.to(wide)
    by_content = (asks + content_bias[:, None].to(wide)) * scale
    by_position = (asks if position_bias is None else asks + position_bias[:, None].to(wide)) * scale
    scores = (by_content[:, :, :, None] * key.to(wide)[:, :, None]).sum(-1)
    scores = scores + (by_position[:, :, :, None] * positions.to(wide)[None, :, None]).sum(-1)
    if distance_bias is not None:
        scores = scores + distance_bias[:, None].to(wide) * scale
    allowed = dense_mask(mask, 1, k_len, query.device, k_len - 1)
    return weighted_by_sums(scores, value, allowed).to(query.dtype)


def _lanes_at_once(batch: int, numbers_each: int, device: torch.device) -> int:
    """How many lanes of so many scores make a tile; elsewhere than on a CPU all do."""
    return max(1, _TILE_NUMBERS // max(1, numbers_each)) if device.type == "cpu" else max(1, batch)


def _shifted(by_distance: Tensor) -> Tensor:
    """`relative_shift` as a view. by_distance: (heads, lanes, q_len, k_len), contiguous -> (lanes, heads, q_len, k_len)

    In memory, row i + 1 begins k_len numbers after row i and is to move one place less: a step of k_len - 1 does it.
    """
    heads, lanes, q_len, k_len = by_distance.shape
    strides = (q_len * k_len, lanes * q_len * k_len, k_len - 1, 1)
    return by_distance.as_strided((lanes, heads, q_len, k_len), strides, by_distance.storage_offset() + q_len - 1)


def _unshifted(shifted: Tensor, out: Tensor | None = None) -> Tensor:
    """The transpose of `_shifted` for gradients, which are zero at keys after the query.

    Shape: (lanes, heads, q_len, k_len) -> (heads, lanes, q_len, k_len). out: where to, if it has that shape: what an
    earlier call returned.
    """
    lanes, heads, q_len, k_len = shifted.shape
    if out is None or out.shape[1] != lanes:
        out = shifted.new_zeros(heads, lanes, q_len, k_len)
    flat = out.view(heads, lanes, q_len * k_len)
    # The last column of all rows but the last belongs to keys after the query; the rest lies in one piece.
    flat[..., q_len - 1 : -1].view(heads, lanes, q_len, k_len - 1).copy_(shifted[..., :-1].transpose(0, 1))
    flat[..., -1] = shifted[:, :, -1, -1].t()
    return out


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
            key, value = _laid_out(key.to(compute)), _laid_out(value.to(compute))
            positions = positions.to(compute)
            place_columns = positions.transpose(-1, -2)
            content_add, position_add, distance_add = (
                None if bias is None else (bias * scale).to(compute)[:, None]
                for bias in (content_bias, position_bias, distance_bias)
            )  # (heads, 1, head_dim or k_len)
            by_content = _biased(query, content_add, scale, out=query.new_empty(query.shape))
            position_add = None if position_add is None else position_add[:, None]
            hidden = torch.zeros(allowed.shape, dtype=compute, device=query.device)
            hidden.masked_fill_(~allowed, -torch.inf)
            empty_rows = some_row_is_empty(allowed)
            out = query.new_empty(batch, heads, q_len, value.shape[-1])
            weights = query.new_empty(batch, heads, q_len, k_len) if keeps else None
            kept = query.new_empty(batch, heads, q_len, k_len) if keeps and rate else None
            masks = RowMasks(batch, heads * q_len * k_len, rate, query.device) if rate else None
            by_position = query.new_empty(query.numel())
            lanes = _lanes_at_once(batch, heads * q_len * k_len, query.device)
            room = query.new_empty(min(lanes, batch), heads, q_len, k_len)
            # All tiles' views in one call: a view costs the call.
            askings = _askings(by_position, query.shape, lanes)
            key_columns = torch.split(_flat(key).transpose(-1, -2), lanes * heads)
            by_contents, values, outs = (torch.split(_flat(x), lanes * heads) for x in (by_content, value, out))
            for n, first in enumerate(range(0, batch, lanes)):
                here = slice(first, first + lanes)
                asks = query[here]
                count = len(asks)
                _biased(asks.transpose(0, 1), position_add, scale, out=askings[n].view(heads, count, q_len, head_dim))
                by_distance = torch.bmm(askings[n], place_columns).view(heads, count, q_len, k_len)
                if distance_add is not None:
                    by_distance += distance_add[:, None]
                scores = room[:count]
                torch.add(_shifted(by_distance), hidden[here] if hidden.shape[0] > 1 else hidden, out=scores)
                _flat(scores).baddbmm_(by_contents[n], key_columns[n])
                # In float32 inside, whatever the scores' type.
                tile = torch.softmax(scores, dim=-1, out=None if weights is None else weights[here])
                if empty_rows:
                    tile.masked_fill_(~(allowed[here] if allowed.shape[0] > 1 else allowed), 0.0)
                if masks is not None:
                    tile_kept = masks.of(tile, first)
                    tile = tile * tile_kept
                    if kept is not None:
                        kept[here] = tile_kept
                torch.bmm(_flat(tile), values[n], out=outs[n])
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
        grad_content, grad_position = torch.empty_like(by_content), torch.empty_like(by_content)
        grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
        grad_positions = torch.zeros_like(positions, dtype=statistics)
        grad_distance = torch.zeros(heads, k_len, dtype=statistics, device=key.device) if distance_dtype else None
        lanes = _lanes_at_once(batch, heads * q_len * k_len, key.device)
        room: Tensor | None = None
        with torch.autocast(key.device.type, enabled=False):
            grad_outs = torch.split(_flat(grad_out.to(weights.dtype)), lanes * heads)
            askings = _askings(by_position, by_content.shape, lanes)
            by_contents, keys, values, grad_contents, grad_keys, grad_values = (
                torch.split(_flat(x), lanes * heads)
                for x in (by_content, key, value, grad_content, grad_key, grad_value)
            )
            for n, first in enumerate(range(0, batch, lanes)):
                here = slice(first, first + lanes)
                tile = used = weights[here]
                grad_tile = torch.bmm(grad_outs[n], values[n].transpose(-1, -2)).view_as(tile)
                if kept is not None:
                    grad_tile *= kept[here]
                    used = tile * kept[here]
                torch.bmm(_flat(used).transpose(-1, -2), grad_outs[n], out=grad_values[n])
                grad_scores = torch._softmax_backward_data(grad_tile, tile, -1, tile.dtype)
                flat = _flat(grad_scores)
                torch.bmm(flat, keys[n], out=grad_contents[n])
                torch.bmm(flat.transpose(-1, -2), by_contents[n], out=grad_keys[n])
                room = _unshifted(grad_scores, room)
                by_distance = room.flatten(1, 2)  # (heads, lanes x q_len, k_len)
                grad_asking = torch.bmm(by_distance, positions).view(heads, -1, q_len, positions.shape[-1])
                grad_position[here] = grad_asking.transpose(0, 1)
                grad_positions += torch.bmm(by_distance.transpose(-1, -2), askings[n])
                if grad_distance is not None:
                    grad_distance += by_distance.sum(dim=1, dtype=statistics)

            def of_bias(grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
                return None if dtype is None else (grad.sum(dim=(0, 2), dtype=statistics) * ctx.scale).to(dtype)

            # Heads behind queries in memory, as the projection's gradient wants it, which would else copy it.
            grad_query = by_content.new_empty(batch, q_len, heads, by_content.shape[-1]).transpose(1, 2)
            torch.add(grad_content, grad_position, out=grad_query).mul_(ctx.scale)
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


def _biased(query: Tensor, bias: Tensor | None, scale: float, out: Tensor) -> Tensor:
    """query * scale + bias, rounded once."""
    return torch.mul(query, scale, out=out) if bias is None else torch.add(bias, query, alpha=scale, out=out)


def _askings(by_position: Tensor, shape: torch.Size, lanes: int) -> list[Tensor]:
    """The queries of some lanes after those of others, as the product with positions takes them: heads come first.

    Shape: (batch x heads x q_len x head_dim,) -> of (heads, lanes x q_len, head_dim) each. Args: shape: the queries'.
    """
    _, heads, q_len, head_dim = shape
    parts = torch.split(by_position, lanes * heads * q_len * head_dim)
    return [part.view(heads, part.numel() // (heads * head_dim), head_dim) for part in parts]


def _flat(x: Tensor) -> Tensor:
    """Lanes and heads as one axis."""
    return x.flatten(0, 1)


def _laid_out(x: Tensor) -> Tensor:
    """Keys or values as products take them without copying: else each tile would be copied, keys turned over.

    Lanes and heads must be one axis in memory, which they are in a cache; of 16 bits a part of a buffer will not do.
    """
    if x.element_size() < 4 and x.device.type == "cpu":
        return x.contiguous()
    return x.flatten(0, 1).view(x.shape)


def _behind(memory: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """`linear` of x behind the memory, (batch, memory_len + q_len, out_features)."""
    if memory is None:
        return linear(x, weight)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or memory.requires_grad:
        return linear(torch.cat([memory, x], dim=1), weight)
    kind = x.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    out: Tensor = _Behind.apply(memory, x, weight, compute)  # type: ignore[no-untyped-call]
    return out


class _Behind(torch.autograd.Function):
    """Y = [M; X] W^T. With G the gradient of Y: G W of X, from X's rows alone, and G^T [M; X] of W."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, x: Tensor, weight: Tensor, compute: torch.dtype | None) -> Tensor:
        ctx.dtypes = x.dtype, weight.dtype
        with torch.autocast(x.device.type, enabled=False):
            joined = torch.cat([memory, x], dim=1)
            if compute is not None:
                joined, weight = joined.to(compute), weight.to(compute)
            ctx.save_for_backward(joined, weight)
            ctx.memory_len = memory.shape[1]
            return linear(joined, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        joined, weight = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            grad_x = None
            if needs_x:
                # As one matrix: in three axes, of which two do not join without a copy, it would be a product a lane.
                grad_new = grad[:, ctx.memory_len :]
                grad_x = product(grad_new.flatten(0, 1), weight).view(*grad_new.shape[:2], -1).to(x_dtype)
            grad_weight = None
            if needs_weight:
                grad_weight = product_of_rows(grad.flatten(0, 1), joined.flatten(0, 1)).to(weight_dtype)
        return None, grad_x, grad_weight, None


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

        >>> attention = RelativeAttention(d_model=16, num_heads=4)
        >>> hidden, memory = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
        >>> out, weights = attention(hidden, memory, need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 8]))
        >>> whole = attention(torch.cat([memory, hidden], dim=1))  # distances are all it knows of places
        >>> torch.allclose(whole[:, 3:], out, atol=1e-5)
        True

    Paper: Dai et al. 2019, sec. 3.3. Symbols: W_q, W_k,E, W_v = q_proj, k_proj, v_proj; W_k,R = position_proj; u, v =
        content_bias, position_bias.
    Args:
        d_model: width of input and output.
        num_heads, head_dim: heads and their width; their product need not be d_model. None is d_model / num_heads.
        dropout: rate on the attention weights, in training.
        bias: biases of the projections: of none, as in the paper, of all four, or of those named.

    To share u and v among layers, assign the parameters.
    Raises: ConfigError: a size below 1, d_model that is not divisible by num_heads where no head_dim is given, or bias
        is no such thing.
    """

    causal = True
    """No query sees a later key, whatever the mask."""
    packed: Packed | None = None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        dropout: float = 0.0,
        bias: bool | Collection[str] = False,
    ) -> None:
        super().__init__()
        if head_dim is None and num_heads > 0 and d_model % num_heads:
            raise ConfigError(
                f"d_model {d_model} is not divisible by num_heads {num_heads}; change one of them, or give head_dim."
            )
        head_dim = d_model // max(1, num_heads) if head_dim is None else head_dim
        if min(d_model, num_heads, head_dim) < 1:
            raise ConfigError(f"d_model {d_model}, num_heads {num_heads} and head_dim {head_dim} must be at least 1.")
        self.num_heads, self.head_dim = num_heads, head_dim
        self.dropout_rate = dropout
        inner, biased = num_heads * head_dim, biased_projections(bias)
        self.q_proj = Linear(d_model, inner, bias="q_proj" in biased)
        self.k_proj = Linear(d_model, inner, bias="k_proj" in biased)
        self.v_proj = Linear(d_model, inner, bias="v_proj" in biased)
        self.out_proj = Linear(inner, d_model, bias="out_proj" in biased)
        self.content_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self._make_position_parameters(d_model)
        self.weights_hook: Callable[[Tensor], None] | None = None
        self.reset_parameters()

    def _make_position_parameters(self, d_model: int) -> None:
        self.position_proj = Linear(d_model, self.num_heads * self.head_dim, bias=False)
        self.position_bias: nn.Parameter | None = nn.Parameter(torch.empty(self.num_heads, self.head_dim))

    def reset_parameters(self) -> None:
        """N(0, 0.02): the official code; it has no biases, which begin at zero."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def places(self, q_len: int, k_len: int, like: Tensor) -> Tensor:
        """What `project_positions` is given for queries that are the last of the keys. like: its device and type."""
        distances = _distances(q_len, k_len, self.causal, like.device)
        return sinusoidal_table(distances.float(), self.q_proj.in_features, "halves").to(like.dtype)

    def project_positions(self, places: Float[Tensor, "k_len d_model"]) -> tuple[Tensor, Tensor | None]:
        """r of every distance, once for all lanes. places: encodings, farthest first.

        Returns: (heads, k_len, head_dim), and a score of each distance (heads, k_len), which this kind has not.
        """
        return self.position_proj(places).unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, 1), None

    def project_query(self, x: Tensor) -> Tensor:
        """(batch, q_len, d_model) -> (batch, heads, q_len, head_dim)"""
        return split_heads(self.q_proj(x), self.num_heads)

    def project_memory(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values in one product: (batch, q_len, d_model) -> two of (batch, heads, k_len, head_dim).

        Args: memory: what stands before x, (batch, memory_len, d_model); it gets a gradient only if it asks for one.
        """
        length = x.shape[1] if memory is None else memory.shape[1] + x.shape[1]
        biased = any(projection.bias is not None for projection in (self.k_proj, self.v_proj))
        if biased or x.shape[0] * length < self.head_dim * self.num_heads:
            # Joining the weights would cost more than the product saves: a step of generation.
            x = x if memory is None else torch.cat([memory, x], dim=1)
            k, v = self.k_proj(x), self.v_proj(x)
        else:
            k, v = _behind(memory, x, torch.cat([self.k_proj.weight, self.v_proj.weight])).chunk(2, dim=-1)
        return split_heads(k, self.num_heads), split_heads(v, self.num_heads)

    def project_together(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same x: (batch, q_len, d_model) -> (batch, heads, q_len, head_dim)."""
        maps = (self.q_proj, self.k_proj, self.v_proj)
        if self.packed is not None and self.packed.serves(x, *maps):
            q, k, v = (split_heads(part, self.num_heads) for part in self.packed.linear(x).chunk(3, dim=-1))
            return q, k, v
        return self.project_query(x), *self.project_memory(x)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, distance_bias: Tensor | None, mask: Mask | None
    ) -> Float[Tensor, "batch q_len d_model"]:
        """Attention over projected heads, merged and projected out; see `relative_attention`."""
        if self.weights_hook is not None:
            return self.attend_openly(q, k, v, positions, distance_bias, mask)[0]
        rate = self.dropout_rate if self.training else 0.0
        parts = (positions, self.content_bias, self.position_bias, distance_bias)
        out: Tensor = self.out_proj(merge_heads(relative_attention(q, k, v, *parts, mask, rate, self.causal)))
        return out

    def attend_openly(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, distance_bias: Tensor | None, mask: Mask | None
    ) -> tuple[Float[Tensor, "batch q_len d_model"], Float[Tensor, "batch heads q_len k_len"]]:
        """`attend`, and the weights before dropout."""
        weights = relative_weights(
            q, k, positions, self.content_bias, self.position_bias, distance_bias, mask, self.causal
        )
        if self.weights_hook is not None:
            self.weights_hook(weights)
        rate = self.dropout_rate if self.training else 0.0
        out: Tensor = self.out_proj(merge_heads(torch.matmul(dropout(weights, rate), v)))
        return out, weights

    def forward(
        self,
        x: Float[Tensor, "*batch q_len d_model"],
        memory: Float[Tensor, "*batch memory_len d_model"] | None = None,
        places: Tensor | None = None,
        mask: Mask | None = None,
        *,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from every position of x to the memory and to x.

        Args:
            x: (batch, q_len, d_model), or (q_len, d_model).
            memory: what stands before x, already normalised where x is.
            places: see `project_positions`; one row a distance. None: see `places`.
            mask: what else is hidden, over memory and x.
            need_weights: hand out the attention weights as well, those before dropout.

        Returns: (batch, q_len, d_model); if asked for, weights (batch, heads, q_len, k_len) as well. Without batch if x
            has none.
        Raises: ShapeError: x has neither two nor three axes.
        """
        if x.dim() == 2:
            answer = self.forward(x[None], None if memory is None else memory[None], places, mask, need_weights=True)
            return (answer[0][0], answer[1][0]) if need_weights else answer[0][0]
        if x.dim() != 3:
            raise ShapeError(f"x of shape {tuple(x.shape)} must be (batch, q_len, d_model), or (q_len, d_model).")
        k, v = self.project_memory(x, memory)
        if places is None:
            places = self.places(x.shape[1], k.shape[2], x)
        given = (self.project_query(x), k, v, *self.project_positions(places), mask)
        return self.attend_openly(*given) if need_weights else self.attend(*given)


def _distances(q_len: int, k_len: int, causal: bool, device: torch.device) -> Int[Tensor, " num_distances"]:
    """From the last query to the first key, down to 0; or down to that from the first query to the last key."""
    return torch.arange(k_len - 1, -1 if causal else -q_len, -1, device=device)


class LearnedRelativeAttention(RelativeAttention):
    """Relative attention with a trained key and a trained score for every distance and head.

        >>> attention = LearnedRelativeAttention(16, 4, max_len=64, num_future=63)
        >>> attention(torch.randn(2, 5, 16)).shape  # every position sees every other
        torch.Size([2, 5, 16])

    Paper: Shaw et al. 2018, arXiv:1803.02155, in the form of the official Transformer-XL's attention type 1.
    Args:
        max_len: distances from 0 up that are told apart; from max_len - 1 on all are one.
        num_future: distances below 0 that are told apart, of keys after the query; below -num_future all are one. 0:
            no query sees a later key.
        others: see `RelativeAttention`.

    Shape: distance_embedding (num_future + max_len, heads, head_dim), distance_bias (num_future + max_len, heads), by
        rising distance from -num_future.
    Raises: ConfigError: see `RelativeAttention`; max_len is below 1, or num_future below 0.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        max_len: int,
        num_future: int = 0,
        dropout: float = 0.0,
        bias: bool | Collection[str] = False,
    ) -> None:
        if max_len < 1 or num_future < 0:
            raise ConfigError(f"max_len is {max_len} and num_future {num_future}; they must be at least 1 and 0.")
        self.max_len, self.num_future, self.causal = max_len, num_future, num_future == 0
        super().__init__(d_model, num_heads, head_dim, dropout=dropout, bias=bias)

    def _make_position_parameters(self, d_model: int) -> None:
        self.position_bias = None
        distances = self.num_future + self.max_len
        self.distance_embedding = nn.Parameter(torch.empty(distances, self.num_heads, self.head_dim))
        self.distance_bias = nn.Parameter(torch.empty(distances, self.num_heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.distance_bias)

    def places(self, q_len: int, k_len: int, like: Tensor) -> Tensor:
        return _distances(q_len, k_len, self.causal, like.device)

    def project_positions(self, places: Int[Tensor, " num_distances"]) -> tuple[Tensor, Tensor | None]:
        """Rows of the tables. places: distances, farthest first."""
        rows = places.clamp(-self.num_future, self.max_len - 1) + self.num_future
        return self.distance_embedding[rows].transpose(0, 1), self.distance_bias[rows].t()
