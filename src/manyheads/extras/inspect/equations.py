"""The tensors of one forward pass: what every module computes, and with which equation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from manyheads.architectures.reformer.layers import AttentionSublayer, FeedForwardSublayer
from manyheads.architectures.reformer.model import Reformer
from manyheads.architectures.reformer.translator import (
    CrossSublayer,
    ReformerTranslator,
    SelfSublayer,
)
from manyheads.architectures.transformer.model import Decoder, Encoder
from manyheads.extras.classification.model import TextPooling
from manyheads.extras.parsing.span_parser import SpanHead, WordEncoder
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import DistanceEncoding, LearnedRelativeAttention, RelativeAttention
from manyheads.nn.attention.scores import AdditiveScore
from manyheads.nn.heads.adaptive import AdaptiveEmbedding, AdaptiveHead
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.layers import FeedForward, Residual
from manyheads.nn.positions import (
    AxialPositions,
    FeatureEmbedding,
    LearnedPositions,
    SinusoidalPositions,
    TokenEmbedding,
)

__all__ = ["ATTENTION", "EQUATIONS", "PARTS", "attention_tensors", "head_equation"]

ATTENTION = MultiHeadAttention | RelativeAttention | LSHSelfAttention | LocalSelfAttention
Named = tuple[str, tuple[int, ...], str]


def _embedding(module: Any) -> str:
    return "√d_model · E[ids]" if module.scale != 1.0 else "E[ids]"


def _adaptive_embedding(module: Any) -> str:
    return "√d_model · E[ids]" if module.projections is None else "√d_model · E_c[ids] P_cᵀ, c the cluster of an id"


def _feed_forward(module: Any) -> str:
    names = {"relu": "max(0, x W₁ + b₁)"}
    inner = names.get(module.activation, f"{module.activation}(x W₁ + b₁)")
    return f"{inner} W₂ + b₂" if module.in_proj.bias is not None else f"{inner} W₂".replace(" + b₁", "")


def _residual(module: Any) -> str:
    return "x + f(LN(x))" if module.position == "pre" else "LN(x + f(x))"


def _sinusoid(module: Any) -> str:
    order = "interleaved" if module.layout == "interleaved" else "sines first"
    return f"x + PE; PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos, {order}"


def _axial(module: Any) -> str:
    """Position p of a grid (a, b) is in row p // b and column p % b."""
    parts, below = [], 1
    for number, size in reversed(list(enumerate(module.shape, start=1))):
        place = "pos" if below == 1 else f"⌊pos / {below}⌋"
        parts.append(f"P{'₀₁₂₃₄₅₆₇₈₉'[number % 10]}[{place}{f' mod {size}' if number > 1 else ''}]")
        below *= size
    return f"x + [{', '.join(reversed(parts))}], side by side"


EQUATIONS: dict[type[nn.Module], tuple[str, Callable[[Any], str]]] = {
    TokenEmbedding: ("embedded", _embedding),
    AdaptiveEmbedding: ("embedded", _adaptive_embedding),
    FeatureEmbedding: ("sum of features", lambda _: "Σ E[f], f the features of a position"),
    SinusoidalPositions: ("with positions", _sinusoid),
    LearnedPositions: ("with positions", lambda _: "x + P[pos]"),
    DistanceEncoding: ("encoded distances R", lambda _: "sin, then cos of (i - j) / 10000^(2k/d)"),
    AxialPositions: ("with positions", _axial),
    FeedForward: ("feed-forward", _feed_forward),
    Residual: ("sublayer's output", _residual),
    AttentionSublayer: ("changed stream", lambda _: "x + attention(LN(x')), x' the other stream"),
    SelfSublayer: ("changed stream", lambda _: "x + attention(LN(x')), x' the other stream"),
    CrossSublayer: ("changed stream", lambda _: "x + attention(LN(x'), memory), x' the other stream"),
    TextPooling: ("text vector", lambda pool: "h₁" if pool.kind == "first" else "mean of the real positions' h"),
    FeedForwardSublayer: ("changed stream", lambda _: "x + feed-forward(LN(x')), x' the other stream"),
}
"""Class -> the name and the equation of its output; for attention see `attention_tensors`.

A sublayer of a Reformer returns the addend of a stream; the line shows the sum, which has the same shape.
"""

PARTS: dict[type[nn.Module], Mapping[str, tuple[str, str]]] = {
    Encoder: {"norm": ("memory", "LN(x)")},
    Decoder: {"norm": ("hidden states", "LN(x)")},
    Reformer: {"norm": ("hidden states", "LN([x₁, x₂]), the two streams side by side")},
    ReformerTranslator: {
        "encoder_norm": ("memory", "LN((x₁ + x₂) / 2), of the two streams"),
        "decoder_norm": ("hidden states", "LN((x₁ + x₂) / 2), of the two streams"),
    },
    WordEncoder: {
        "word_norm": ("normalised words", "LN(x)"),
        "window_proj": ("windows", "[.., x_(i-1), x_i, x_(i+1), ..] W + b; max(0, windows) is added to x"),
    },
}
"""Class -> name of a part, which it may lack -> the name and the equation of the part's output."""


def attention_tensors(layer: Any, is_cross: bool, output: Tensor, seen: Tensor | None) -> Iterator[Named]:
    """Yield name, shape and equation of the tensors of one call of an attention layer.

    Args:
        output: (batch, q_len, d_model).
        seen: the weights, or the buckets of hashed attention; None: none were computed.
    """
    batch, q_len, _ = output.shape
    heads = (batch, layer.num_heads)
    queries = (*heads, q_len, layer.head_dim)
    if isinstance(layer, LSHSelfAttention):
        scale = "" if layer.settings.scale == 1 else f"{layer.settings.scale:g} "
        yield "queries, shared", queries, "Q = x W_QK, in heads"
        yield "keys", queries, f"K = {scale}Q / |Q|"
        yield "values", queries, "V = x W_V, in heads"
        if seen is not None:
            rounds, places = seen.shape[2], -(-q_len // layer.settings.chunk_len) * layer.settings.chunk_len
            drawn = (layer.num_heads, layer.head_dim, rounds, sum(layer.factors) // 2)
            yield "rotations", drawn, "R ~ N(0, 1), from the hash seed"
            yield "buckets", tuple(seen.shape), _bucket_equation(layer.factors)
            yield "order", (*heads, rounds, places), "positions sorted by (bucket, position), each round's"
        yield (
            "output",
            tuple(output.shape),
            f"concat(A V) W_O{_bias(layer.out_proj)}; {_hashed_weights(layer, seen is not None)}",
        )
        return
    if isinstance(layer, LocalSelfAttention):
        for name, letter in zip(("queries", "keys", "values"), "QKV", strict=True):
            yield name, queries, f"{letter} = x W_{letter}, in heads"
        yield "output", tuple(output.shape), f"concat(A V) W_O{_bias(layer.out_proj)}; {_local_weights(layer)}"
        return
    assert seen is not None
    k_len = seen.shape[3]
    keys = (*heads, k_len, layer.head_dim)
    values = (*heads, k_len, layer.v_proj.out_features // layer.num_heads)
    source = "memory" if is_cross else "[memory; x]" if k_len > q_len else "x"
    yield "queries", queries, f"Q = x W_Q{_bias(layer.q_proj)}, in heads"
    yield "keys", keys, f"K = {source} W_K{_bias(layer.k_proj)}, in heads"
    yield "values", values, f"V = {source} W_V{_bias(layer.v_proj)}, in heads"
    if isinstance(layer, RelativeAttention):
        learned = isinstance(layer, LearnedRelativeAttention)
        equation = "a trained row per distance i - j" if learned else "r = R W_R, in heads"
        yield "distances", keys[1:], equation
    elif isinstance(layer.score, AdditiveScore):
        yield "scores", tuple(seen.shape), "wᵀ tanh(Wq q + Wk k)"
    yield "weights", tuple(seen.shape), _weights_equation(layer)
    yield "output", tuple(output.shape), f"concat(A V) W_O{_bias(layer.out_proj)}"


def head_equation(model: nn.Module) -> str:
    head = model.head
    if isinstance(head, AdaptiveHead):
        return "log P(cluster of w | x) + log P(w | cluster, x)"
    if isinstance(head, SpanHead):
        return "log softmax([0; max(0, LN(W₁ (x_j - x_i) + b₁)) W₂ + b₂]), x_i the fencepost before word i + 1"
    bias = " + b" if isinstance(head, LinearHead) and head.bias is not None else ""
    return f"log softmax(x Wᵀ{bias})"


def _weights_equation(layer: Any) -> str:
    if isinstance(layer, LearnedRelativeAttention):
        return "A = softmax(((q + u)·k + q·r + b) / √d_k)"
    if isinstance(layer, RelativeAttention):
        return f"A = softmax(((q + u)·k + (q + v)·r) / √d_k{' + b(j - i)' if layer.relative_bias is not None else ''})"
    bias = " + b(j - i)" if getattr(layer, "relative_bias", None) is not None else ""
    return f"A = softmax({'Q Kᵀ / √d_k' if layer.score is None else 'scores'}{bias})"


def _bucket_equation(factors: tuple[int, ...]) -> str:
    if len(factors) == 1:
        return "h = argmax [Q R; -Q R], in each round"
    terms, below = ["h₁"], factors[0]
    for number, factor in enumerate(factors[1:], start=2):
        terms.append(f"{below} h{'₀₁₂₃₄₅₆₇₈₉'[number]}")
        below *= factor
    return f"h = {' + '.join(terms)}, each argmax [Q Rᵢ; -Q Rᵢ], in each round"


def _hashed_weights(layer: LSHSelfAttention, hashed: bool) -> str:
    settings = layer.settings
    if not hashed:
        who = "all earlier positions, oneself if there are none" if settings.causal else "all other positions"
    elif settings.visible == "bucket":
        who = f"the last {settings.chunk_len} earlier positions of Q's bucket, in all rounds"
    else:
        sides = [f"the {_number(n)} {side}" for n, side in _neighbours(settings) if n]
        bucket = " in Q's bucket" if settings.within_bucket else ""
        chunks = " and ".join(["its own", *sides])
        who = f"sorted chunks of {settings.chunk_len}: {chunks}{bucket}, in all rounds{_earlier(settings.causal)}"
    exact = f"; below position {settings.exact_len}, over all earlier ones" if hashed and settings.exact_len else ""
    return f"A = softmax(Q Kᵀ) over {who}{exact}"


def _local_weights(layer: LocalSelfAttention) -> str:
    near = [f"the {_number(n)} {side}" for n, side in _neighbours(layer) if n]
    where = " and ".join(["its own", *near])
    trained = layer.distance_penalties is not None
    slopes = (" - p(|i - j|)" if trained else " - slope |i - j|") if layer.sloped else ""
    return f"A = softmax(Q Kᵀ / √d_k{slopes}) over chunks of {layer.chunk_len}: {where}{_earlier(layer.causal)}"


def _neighbours(settings: Any) -> tuple[tuple[int, str], tuple[int, str]]:
    return (settings.chunks_before, "before"), (settings.chunks_after, "after")


def _number(count: int) -> str:
    return "one" if count == 1 else str(count)


def _earlier(causal: bool) -> str:
    return ", nothing later" if causal else ""


def _bias(projection: nn.Module) -> str:
    return "" if projection.bias is None else " + b"
