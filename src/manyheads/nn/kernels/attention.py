"""Scaled dot-product attention: softmax(Q K^T / sqrt(d_k)) V.

`plain_attention` is the formula. `dot_product_attention` computes it with the implementation that `policy` selects.

Paper: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.1, eq. 1.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.errors import ConfigError, RequestError, ShapeError, TensorTypeError
from manyheads.nn.attention.masks import Bias, Both, ByDistance, Causal, Dense, Mask, NeverEmpty, Segments, dense_bias
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.shapes import Bool, Float, check_tensors, explained


def masked_softmax(
    scores: Float[Tensor, "*rows k_len"],
    allowed: Bool[Tensor, ...] | None,
    fully_masked: Literal["zeros", "uniform"] = "zeros",
) -> Float[Tensor, "*rows k_len"]:
    """Return the softmax over the last axis, with weight 0 for keys that may not be attended to.

        >>> masked_softmax(torch.zeros(2, 4), torch.tensor([[True, True, False, False], [False] * 4])).tolist()
        [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]

    Args:
        scores: any leading axes.
        allowed: broadcastable to scores, True = may attend; None allows all.
        fully_masked: weights of a row without allowed keys: all zeros, or 1 / k_len each (as in d2l).

    Returns: weights in the dtype of scores, summed at least in float32. The gradient of a row without allowed keys is
        zero, never NaN.
    Raises: ConfigError: fully_masked has another value. ShapeError: scores are whole numbers; allowed is not of bools,
        or cannot be broadcast.
    """
    if fully_masked not in ("zeros", "uniform"):
        raise ConfigError(f"fully_masked is {fully_masked!r}; it must be 'zeros' or 'uniform'.")
    if not modes.is_compiled():
        _check_scores(scores, allowed)
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    blocked, lowest = ~allowed, torch.finfo(scores.dtype).min
    # With a finite fill a row without allowed keys has equal weights and no NaN. `zeros` then sets them to zero.
    if fully_masked == "zeros" and policy.adds_masks(scores, blocked):
        # Half the time of `masked_fill`, forward and backward: 301 instead of 528 us for 64 x 4 x 32 x 32 (decision
        # 001). score + lowest number = lowest number in floating point, and a weight of zero has no gradient.
        filled = scores + torch.zeros_like(blocked, dtype=scores.dtype).masked_fill_(blocked, lowest)
    else:
        filled = scores.masked_fill(blocked, lowest)
    # torch's softmax sums at least in float32, whatever the dtype of the scores.
    weights = torch.softmax(filled, dim=-1)
    if fully_masked == "zeros" and some_row_is_empty(allowed):
        weights = weights.masked_fill(blocked, 0.0)
    return weights


def _check_scores(scores: Tensor, allowed: object) -> None:
    check_tensors(scores=scores)
    if not scores.is_floating_point():
        raise ShapeError(f"scores are of {scores.dtype}; give numbers of a floating type.")
    if allowed is None:
        return
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
        kind = f"a tensor of {allowed.dtype}" if isinstance(allowed, Tensor) else type(allowed).__name__
        raise TensorTypeError(
            f"allowed is {kind}; give a tensor of bools, True = may attend: of numbers mask != 0, of lengths"
            " torch.arange(k_len) < lengths[:, None, None], of a description mask.allowed(queries, keys)."
        )
    axes = zip(scores.shape[::-1], allowed.shape[::-1], strict=False)
    if any(size != given and 1 not in (size, given) for size, given in axes):
        raise ShapeError(
            f"allowed has shape {tuple(allowed.shape)}, which does not fit scores of shape {tuple(scores.shape)}; the"
            " last axis is the keys, and an axis may be 1."
        )


def weighted_by_sums(
    scores: Float[Tensor, "batch heads q_len k_len"],
    value: Float[Tensor, "batch heads k_len value_dim"],
    allowed: Bool[Tensor, ...] | None,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Return `masked_softmax(scores, allowed) @ value` without matrix products, in the dtype of the scores.

    For compiled steps on CPUs: the compiler fuses this and the sums of the scores into one loop that reads the values
    in place, without a copy or a library call (decision 016).
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    exps = (scores - scores.amax(-1, keepdim=True)).exp()
    if allowed is not None:
        exps = exps.masked_fill(~allowed, 0.0)
    # The division comes last: one per feature instead of one per key (325 instead of 346 us per layer). The largest
    # allowed exp is 1, so the sum is at least 1, unless no key is allowed.
    weighted = (exps[..., None] * value.to(scores.dtype)[:, :, None]).sum(3)
    return weighted / exps.sum(-1, keepdim=True).clamp(min=1)


def check_distances(q_len: int, k_len: int, num_distances: int, causal: bool) -> None:
    """For relative attention.

    Raises: ShapeError: causal with more queries than keys, or the number of distances is wrong.
    """
    if causal and q_len > k_len:
        raise ShapeError(
            f"There are {q_len} queries but only {k_len} keys; in causal attention queries are the last of the keys."
        )
    if causal and num_distances != k_len:
        raise ShapeError(f"There are {num_distances} encoded distances for {k_len} keys; give one per key.")
    if not causal and num_distances != k_len + q_len - 1:
        raise ShapeError(
            f"There are {num_distances} encoded distances for {q_len} queries and {k_len} keys; attention in both"
            f" directions needs {k_len + q_len - 1}."
        )


def some_row_is_empty(allowed: Tensor) -> bool:
    """Return whether a row has no allowed key; True where reading the values would wait (GPU) or fail (compiler)."""
    return not policy.can_look(allowed) or not bool(allowed.any(dim=-1).all())


def plain_attention(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    value: Float[Tensor, "batch heads k_len value_dim"],
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    scale: float | None = None,
    first_query: int = 0,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Attention as in the formula; arguments as for `dot_product_attention`. Memory: O(q_len x k_len)."""
    weights = dot_product_weights(query, key, mask, scale, first_query)
    return torch.matmul(dropout(weights, dropout_rate), value)


def dot_product_scores(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    scale: float | None = None,
) -> Float[Tensor, "batch heads q_len k_len"]:
    """Return Q K^T x scale. Args: scale: None means 1 / sqrt(head_dim)."""
    if policy.wants_contiguous(key):
        key = key.contiguous()  # oneDNN would transpose and copy it: 174 instead of 67 us per beam step (decision 013)
    return torch.matmul(query * _scale(query, scale), key.transpose(-1, -2))


def masked_weights(
    scores: Float[Tensor, "batch heads q_len k_len"], mask: Mask | None = None, first_query: int = 0
) -> Float[Tensor, "batch heads q_len k_len"]:
    """Return the softmax of scores + the mask's bias over the keys that the mask allows; see `masked_softmax`."""
    allowed, bias = dense_bias(mask, scores.shape[2], scores.shape[3], scores.device, first_query, scores.shape[0])
    if bias is not None:
        bias = _in_range(bias, scores.dtype)
        is_near = policy.can_look(bias) and bool((bias > torch.finfo(scores.dtype).min / 2).all())
        scores = scores + bias if is_near and scores.dtype is not torch.float16 else _sum(scores, bias, allowed)
    return masked_softmax(scores, allowed)


def _sum(scores: Tensor, bias: Tensor, allowed: Tensor | None) -> Tensor:
    """Return scores + bias minus each row's highest sum: finite, and at most 0, also if all keys have lowest numbers.

    Otherwise a sum could leave the range of the type, or be as low as the number that `masked_softmax` gives to keys
    that are forbidden.
    """
    limits = torch.finfo(scores.dtype)
    total = (scores + bias).clamp(limits.min, limits.max)  # rounded as in torch, where such a number hides the score
    total = total.to(torch.promote_types(scores.dtype, torch.float32))
    seen = total.detach() if allowed is None else total.detach().masked_fill(~allowed, limits.min)
    highest = seen.amax(-1, keepdim=True) if seen.shape[-1] else 0.0
    return (total - highest).clamp(limits.min, 0.0).to(scores.dtype)


@explained
def dot_product_weights(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    mask: Mask | None = None,
    scale: float | None = None,
    first_query: int = 0,
) -> Float[Tensor, "batch heads q_len k_len"]:
    """Return the attention weights before dropout; arguments as for `dot_product_attention`.

    >>> dot_product_weights(torch.randn(2, 8, 5, 64), torch.randn(2, 8, 7, 64)).shape
    torch.Size([2, 8, 5, 7])
    """
    if not modes.is_compiled():
        _check_call(query, key)
    return masked_weights(dot_product_scores(query, key, scale), mask, first_query)


@explained
def dot_product_attention(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    value: Float[Tensor, "batch heads k_len value_dim"],
    mask: Mask | None = None,
    dropout_rate: float = 0.0,
    scale: float | None = None,
    first_query: int = 0,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Return softmax(Q K^T x scale + bias) V.

        >>> from manyheads.nn import Causal
        >>> q, k, v = torch.randn(3, 2, 8, 5, 64).unbind()
        >>> dot_product_attention(q, k, v, Causal()).shape
        torch.Size([2, 8, 5, 64])

    Args:
        mask: the keys that each query may attend to; None: all.
        dropout_rate: of the weights; 0 outside training.
        scale: factor of the scores; None means 1 / sqrt(head_dim).
        first_query: position of the first query among the keys (the number of cached keys).

    Returns: zeros for a query that may not attend to any key.
    Raises: ShapeError: a tensor has other axes, or keys and values differ in number.
    Cost: O(q_len x k_len) time. Memory: O(q_len x k_len) with matrix products, O(q_len + k_len) with SDPA.
    """
    if not modes.is_compiled():  # a graph for any length would depend on the comparison
        _check_call(query, key, value)
    distances = mask.first if isinstance(mask, Both) and isinstance(mask.first, ByDistance) else None
    segments = mask.second if isinstance(mask, Both) and distances is not None else mask
    if isinstance(segments, Segments) and not modes.is_transformed():
        return segment_attention(query, key, value, segments, dropout_rate, scale, distances)
    path = policy.attention_path(query, key, value, dropout_rate)
    if path == "sums":
        return _by_sums(query, key, value, mask, scale, first_query)
    if path == "rounded products":
        return _by_rounded_products(query, key, value, mask, scale, first_query)
    if path == "products" or not query.shape[2] * key.shape[2]:
        return plain_attention(query, key, value, mask, dropout_rate, scale, first_query)
    return _by_sdpa(query, key, value, mask, dropout_rate, scale, first_query)


def segment_attention(
    query: Float[Tensor, "rows heads q_len head_dim"],
    key: Float[Tensor, "rows heads k_len head_dim"],
    value: Float[Tensor, "rows heads k_len value_dim"],
    segments: Segments,
    dropout_rate: float = 0.0,
    scale: float | None = None,
    distances: ByDistance | None = None,
) -> Float[Tensor, "rows heads q_len value_dim"]:
    """Return `dot_product_attention` of each sequence to its own keys.

    On a GPU by torch's kernel, which has no bias; with `distances`, a bias, by the Triton kernel of relative attention.

    Raises: RequestError: dropout, or a width, type or device that the kernel lacks. ShapeError: several rows;
        and, where the values can be read: sequences that do not fill the row, or one longer than `segments.longest`.
    """
    if dropout_rate:
        raise RequestError(
            f"attention over packed sequences has no dropout of weights, here {dropout_rate}; set attention_dropout to"
            " 0, or use padded batches."
        )
    if query.shape[0] != 1 or key.shape[0] != 1:
        raise ShapeError(
            f"packed sequences lie in one row, but there are {query.shape[0]} rows of queries and {key.shape[0]} of"
            " keys; give a mask of lengths for several rows."
        )
    path = policy.segments_path(query, value, distances is not None)
    if path == "products":
        return plain_attention(query, key, value, segments if distances is None else distances & segments, scale=scale)
    if distances is not None and path == "triton":
        return _by_triton(query, key, value, segments, scale, distances)
    if path == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 has no other arguments that are needed here, and `is_causal` no longer.
        longest, window = segments.longest, (-1, 0) if segments.causal else (-1, -1)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (tokens, heads, width)
        starts = segments.query_starts, segments.key_starts
        out = cast(Tensor, varlen_attn(q, k, v, *starts, longest, longest, scale=scale, window_size=window))
        return out.transpose(0, 1).unsqueeze(0)
    found = []
    mask = Causal() & distances if segments.causal else distances
    bounds = [_bounds(segments, "query", query.shape[2]), _bounds(segments, "key", key.shape[2])]
    for (start, stop), (first, end) in zip(*map(pairwise, bounds), strict=True):
        if start < stop:
            some = key[:, :, first:end], value[:, :, first:end]
            found.append(dot_product_attention(query[:, :, start:stop], *some, mask, scale=scale))
    return torch.cat(found, 2) if found else query.new_zeros(*query.shape[:3], value.shape[3])


def _by_triton(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, distances: ByDistance
) -> Tensor:
    """Use the kernel of Transformer-XL's attention, with a number for each distance and zeros as scores by distance."""
    from manyheads.nn.kernels.triton.relative import FusedAttention, Lanes

    longest, unscaled = segments.longest, math.sqrt(query.shape[3])  # the kernel scales the sum of score and bias
    first = distances.before - longest + 1
    column = torch.arange(first, first + (longest if segments.causal else 2 * longest - 1), device=query.device)
    bias = distances.values[:, column.clamp_(0, distances.values.shape[1] - 1)].float() * unscaled
    query = query if scale is None else query * (scale * unscaled)
    given = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]  # (tokens, heads, width)
    given = [x if x.stride(2) == 1 else x.contiguous() for x in given]
    by_distance = query.new_zeros(*query.shape[1:3], len(column))
    starts = segments.query_starts, segments.key_starts
    lanes = Lanes(len(starts[0]) - 1, longest, longest, longest - 1, segments.causal, *starts)
    out = cast(Tensor, FusedAttention.apply(*given, by_distance, bias, None, lanes))  # type: ignore[no-untyped-call]
    return out.transpose(0, 1).unsqueeze(0)


def _bounds(segments: Segments, side: Literal["query", "key"], length: int) -> list[int]:
    """Return where the sequences of a side begin, and the end of the last."""
    bounds: list[int] = getattr(segments, f"{side}_starts").tolist()
    longest = max((stop - start for start, stop in pairwise(bounds)), default=0)
    if bounds[-1] != length or longest > segments.longest:
        raise ShapeError(
            f"the {side} sequences end at {bounds[-1]} and have up to {longest} tokens, but the row has {length}, and"
            f" a sequence at most {segments.longest}; fill the row, or raise `longest`."
        )
    return bounds


def _check_call(query: Tensor, key: Tensor, value: Tensor | None = None) -> None:
    """Refuse other axes, and what SDPA on CPUs computes without an error, from memory behind the shorter of keys and
    values (torch 2.13).
    """
    if query.dim() != 4 or key.dim() != 4 or (value is not None and value.dim() != 4):
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value) if x is not None)
        raise ShapeError(
            f"query, key and value have shapes {shapes}; each must be (batch, heads, length, head_dim): of (length,"
            " width) make x[None, None], of (batch, length, width) x[:, None], or use DotProductAttention."
        )
    if query.shape[3] != key.shape[3]:
        raise ShapeError(
            f"queries have width {query.shape[3]} and keys {key.shape[3]} (shapes {tuple(query.shape)} and"
            f" {tuple(key.shape)}); a dot product needs equal widths, AdditiveAttention does not."
        )
    if value is not None and key.shape[2] != value.shape[2]:
        raise ShapeError(
            f"there are {key.shape[2]} keys and {value.shape[2]} values (shapes {tuple(key.shape)} and"
            f" {tuple(value.shape)}); each key needs one value."
        )


def _by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    dropout_rate: float,
    scale: float | None,
    first_query: int,
) -> Tensor:
    """Use torch's fused kernel: on CPUs 1.3 to 5 times as fast as products in fp32 without dropout (decision 001)."""
    q_len, k_len = query.shape[2], key.shape[2]
    # SDPA's causal flag aligns the first query with the first key, and cannot be combined with a mask.
    plain_causal = isinstance(mask, Causal) and first_query == 0 and q_len == k_len
    given, empty, seen = (None, None, None) if plain_causal else _mask_of_layers(mask, query, k_len, first_query)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=given, dropout_p=dropout_rate, is_causal=plain_causal, scale=scale
    )
    if seen is not None:
        out = out * seen
    elif empty is not None:
        out = out.masked_fill(empty, 0.0)
    # For a mask with a gradient, torch itself computes the formula.
    is_trained = given is not None and given.requires_grad
    if torch.is_grad_enabled() and out.requires_grad and not (is_trained or modes.is_compiled()):
        arguments = (query, key, value, mask, dropout_rate, scale, first_query)
        return cast(Tensor, _TwiceDifferentiable.apply(out, *arguments))  # type: ignore[no-untyped-call]
    return out


def _mask_of_layers(
    mask: Mask | None, query: Tensor, k_len: int, first_query: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return SDPA's mask, and the rows without keys if SDPA does not set them to zero: True for them, or their factor.

    Where launches count, all layers that are called with one mask share what the first of them has computed.
    """
    if mask is None or not policy.saves_launches(query.device) or modes.is_compiled():
        return *_sdpa_mask(mask, query, k_len, first_query), None
    key = key_of_layers(mask, query, k_len, first_query)
    # The pattern of a sentence's source is the same tensor in every step of a search.
    holder = mask.pattern if isinstance(mask, NeverEmpty) else mask
    held: tuple[object, tuple[Tensor | None, Tensor | None, Tensor | None]] | None = holder.__dict__.get("_of_layers")
    if held is not None and held[0] == key:
        return held[1]
    if isinstance(mask, NeverEmpty):
        # Rows of a multiple of 8 numbers, which the kernel would otherwise make in each call.
        space = torch.zeros(*mask.pattern.shape[:-1], -(-k_len // 8) * 8, dtype=query.dtype, device=query.device)
        hidden = space[..., :k_len].masked_fill_(~mask.pattern, -math.inf)
        holder.__dict__["_of_layers"] = key, (hidden, None, None)
        return hidden, None, None
    given, empty = _sdpa_mask(mask, query, k_len, first_query)
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = (given, empty, None)
    if given is not None and empty is not None and given.dtype is torch.bool:
        # In each call torch would convert the mask, and `masked_fill` would copy the output to another layout. A row
        # without keys sees all of them instead, because NaN times zero is NaN.
        hidden = torch.zeros_like(given, dtype=query.dtype).masked_fill_(~(given | empty), -math.inf)
        found = hidden, empty, (~empty).to(query.dtype)
    if given is None or not given.requires_grad:
        mask.__dict__["_of_layers"] = key, found
    return found


def key_of_layers(mask: Mask, query: Tensor, k_len: int, first_query: int) -> tuple[object, ...]:
    """Return what must be equal in two calls that share what was computed of a mask."""
    leaves = [x for x in pytree.tree_leaves(mask) if isinstance(x, Tensor)]
    versions = tuple((id(x), 0 if x.is_inference() else x._version) for x in leaves)
    return query.shape[0], query.shape[2], k_len, first_query, query.dtype, query.device, versions


def _sdpa_mask(mask: Mask | None, query: Tensor, k_len: int, first_query: int) -> tuple[Tensor | None, Tensor | None]:
    allowed, bias = dense_bias(mask, query.shape[2], k_len, query.device, first_query, query.shape[0])
    given = allowed
    if allowed is not None and bias is not None:
        given = _in_range(bias, query.dtype).masked_fill(~allowed, -math.inf)
    if allowed is None or given is None or policy.sdpa_zeroes_empty_rows(given):
        return given, None
    return given, ~allowed.any(dim=-1, keepdim=True)


class _TwiceDifferentiable(torch.autograd.Function):
    """The output of SDPA, which has a first derivative only; where a graph of it is asked for, that of the formula."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, *options: float | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.options = mask, options
        ctx.set_materialize_grads(False)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None or not torch.is_grad_enabled():  # no `create_graph=True`
            return grad, *[None] * 7
        if ctx.options[0]:
            raise RequestError(
                f"attention with dropout {ctx.options[0]} has no second derivative, because torch's fused kernel does"
                " not tell which weights it dropped; set the dropout of attention to 0, or call eval()."
            )
        given = query, key, value = ctx.saved_tensors
        asked = [one for one in given if one.requires_grad]
        out = plain_attention(query, key, value, ctx.mask, 0.0, *ctx.options[1:])
        found = iter(torch.autograd.grad(out, asked, grad, create_graph=True))
        return None, *(next(found) if one.requires_grad else None for one in given), *[None] * 4


def _by_sums(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | None, first_query: int
) -> Tensor:
    """Use elementwise products and sums, at least in float32, in a compiled step of a search on a CPU.

    The compiler fuses them into one loop over keys and values in place. Small matrix products became calls of oneDNN
    on copies, and SDPA was slower than either (decision 016).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(wide)[:, :, :, None] * _scale(query, scale) * key.to(wide)[:, :, None]).sum(-1)
    allowed, bias = dense_bias(mask, query.shape[2], key.shape[2], query.device, first_query, query.shape[0])
    if bias is not None:
        scores = scores + _in_range(bias, wide)
    return weighted_by_sums(scores, value, allowed).to(query.dtype)


def _by_rounded_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | None, first_query: int
) -> Tensor:
    """Use products over copies of keys and values, padded to a multiple of 16 positions that the mask hides.

    oneDNN compiles new kernels for each number of keys, which takes as long as half a step of decoding. With fewer
    different numbers the first translation of 1,000 sentences is 10 to 20% faster on CPUs (decision 006).
    """
    q_len, k_len = query.shape[2], key.shape[2]
    allowed, bias = dense_bias(mask, q_len, k_len, query.device, first_query, query.shape[0])
    missing = -k_len % policy.KEYS_MULTIPLE
    if allowed is None:
        allowed = torch.ones(1, 1, dtype=torch.bool, device=key.device)
    padded = Dense(F.pad(allowed.expand(*allowed.shape[:-1], k_len), (0, missing)))
    added = None if bias is None else Bias(F.pad(bias.expand(*bias.shape[:-1], k_len), (0, missing)))
    key, value = (F.pad(x, (0, 0, 0, missing)) for x in (key, value))
    return plain_attention(query, key, value, padded & added, scale=scale)


def _in_range(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias in another dtype; a number below its range stays finite, because -inf would forbid the key."""
    return bias.clamp(min=max(torch.finfo(one).min for one in (bias.dtype, dtype))).to(dtype)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale
