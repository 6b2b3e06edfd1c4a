"""Tracing of a Reformer: hashed and local attention, two streams, computation in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.architectures.reformer.layers import AttentionSublayer, FeedForwardSublayer
from manyheads.architectures.reformer.model import Reformer
from manyheads.architectures.reformer.translator import (
    CrossSublayer,
    PointSublayer,
    ReformerTranslator,
    SelfSublayer,
)
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention

__all__ = ["JOINED", "STREAMS", "Write", "watch_hashed", "watch_local"]

Write = Callable[[str, torch.Size | tuple[int, ...], str], None]
"""(name, shape, equation): write down a line."""

STREAMS: dict[type[nn.Module], str] = {
    AttentionSublayer: "x + attention(LN(x')), x' the other stream",
    SelfSublayer: "x + attention(LN(x')), x' the other stream",
    CrossSublayer: "x + attention(LN(x'), memory), x' the other stream",
    FeedForwardSublayer: "x + feed-forward(LN(x')), x' the other stream",
    PointSublayer: "x + feed-forward(LN(x')), x' the other stream",
}
"""A sublayer hands out what is added to one stream; the line is of the sum, which has the same shape."""

JOINED: dict[type[nn.Module], Mapping[str, tuple[str, str]]] = {
    Reformer: {"norm": ("hidden states", "LN([x₁, x₂]), the two streams side by side")},
    ReformerTranslator: {
        "encoder_norm": ("memory", "LN((x₁ + x₂) / 2), of the two streams"),
        "decoder_norm": ("hidden states", "LN((x₁ + x₂) / 2), of the two streams"),
    },
}
"""Where streams become one: body -> name of its norm -> what comes out, and how."""


def watch_hashed(layer: LSHSelfAttention, write: Write) -> Callable[[], None]:
    """Record the tensors of one forward pass of a hashed layer. Returns: a function that undoes it.

    Scores and weights have no line, because only chunks of them exist.
    """
    prepare, before = layer._prepare, layer.buckets_hook
    rounds: list[Tensor] = []

    def watched(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        rounds.clear()
        qk, v, order = prepare(*arguments, **options)
        scale = "" if layer.settings.scale == 1 else f"{layer.settings.scale:g} "
        write("queries, shared", qk.shape, "Q = x W_QK, in heads")
        write("keys", qk.shape, f"K = {scale}Q / |Q|")
        write("values", v.shape, "V = x W_V, in heads")
        for buckets in rounds:
            drawn = (layer.num_heads, layer.head_dim, buckets.shape[2], sum(layer.factors) // 2)
            write("rotations", drawn, "R ~ N(0, 1), from the hash seed")
            write("buckets", buckets.shape, _bucket_equation(layer.factors))
        if order is not None:
            write("order", order.shape, "positions sorted by (bucket, position), each round's")
        return qk, v, order

    def note(buckets: Tensor) -> None:
        rounds.append(buckets)
        if before is not None:
            before(buckets)

    def write_output(_: nn.Module, __: Any, output: Tensor) -> None:
        write("output", output.shape, _hashed_equation(layer, hashed=bool(rounds)))

    layer._prepare, layer.buckets_hook = watched, note  # type: ignore[method-assign]
    # Hooks see only `forward`. The layer is called by another method, but its output projection by `forward`.
    hook = layer.out_proj.register_forward_hook(write_output)

    def undo() -> None:
        del layer._prepare  # restores the class's method
        layer.buckets_hook = before
        hook.remove()

    return undo


def watch_local(layer: LocalSelfAttention, write: Write) -> Callable[[], None]:
    """Record the tensors of one forward pass of a local layer. Returns: a function that undoes it."""
    project = layer._project

    def watched(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = project(x)
        for name, letter, tensor in zip(("queries", "keys", "values"), "QKV", made, strict=True):
            write(name, tensor.shape, f"{letter} = x W_{letter}, in heads")
        return made

    def write_output(_: nn.Module, __: Any, output: Tensor) -> None:
        near = [f"the {_number(layer.chunks_before)} before" if layer.chunks_before else ""]
        near += [f"the {_number(layer.chunks_after)} after" if layer.chunks_after else ""]
        where = " and ".join(["its own", *filter(None, near)])
        weights = f"A = softmax(Q Kᵀ / √d_k) over chunks of {layer.chunk_len}: {where}"
        write("output", output.shape, f"concat(A V) W_O{_bias(layer)}; {weights}{_earlier(layer.causal)}")

    layer._project = watched  # type: ignore[method-assign]
    hook = layer.out_proj.register_forward_hook(write_output)

    def undo() -> None:
        del layer._project
        hook.remove()

    return undo


def _bucket_equation(factors: tuple[int, ...]) -> str:
    if len(factors) == 1:
        return "h = argmax [Q R; -Q R], in each round"
    terms, below = ["h₁"], factors[0]
    for number, factor in enumerate(factors[1:], start=2):
        terms.append(f"{below} h{'₀₁₂₃₄₅₆₇₈₉'[number]}")
        below *= factor
    return f"h = {' + '.join(terms)}, each argmax [Q Rᵢ; -Q Rᵢ], in each round"


def _hashed_equation(layer: LSHSelfAttention, *, hashed: bool) -> str:
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
    return f"concat(A V) W_O{_bias(layer)}; A = softmax(Q Kᵀ) over {who}{exact}"


def _neighbours(settings: Any) -> tuple[tuple[int, str], tuple[int, str]]:
    return (settings.chunks_before, "before"), (settings.chunks_after, "after")


def _number(count: int) -> str:
    return "one" if count == 1 else str(count)


def _earlier(causal: bool) -> str:
    return ", nothing later" if causal else ""


def _bias(layer: LSHSelfAttention | LocalSelfAttention) -> str:
    return " + b" if layer.out_proj.bias is not None else ""
