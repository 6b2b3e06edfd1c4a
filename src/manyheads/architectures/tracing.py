"""Every tensor of one reading of a model, from input to output, with the equation that each line of it implements."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.nn.attention.additive import AdditiveScore
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import DistanceEncoding, LearnedRelativeAttention, RelativeAttention
from manyheads.nn.embedding import TokenEmbedding
from manyheads.nn.feed_forward import FeedForward
from manyheads.nn.heads.adaptive import AdaptiveEmbedding, AdaptiveHead
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.positions import AxialPositions, LearnedPositions, SinusoidalPositions
from manyheads.nn.residual import Residual

__all__ = ["EQUATIONS", "TracedTensor", "folded", "trace"]

_LAYER = re.compile(r"^(.*?\blayers)\.(\d+)(.*)$")


@dataclass(frozen=True)
class TracedTensor:
    """One line: where it was made, what it is, its shape, and how it follows from the lines above it."""

    module: str
    name: str
    shape: tuple[int, ...]
    equation: str


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


EQUATIONS: dict[type[nn.Module], tuple[str, Callable[[Any], str]]] = {
    TokenEmbedding: ("embedded", _embedding),
    AdaptiveEmbedding: ("embedded", _adaptive_embedding),
    SinusoidalPositions: ("with positions", _sinusoid),
    LearnedPositions: ("with positions", lambda _: "x + P[pos]"),
    DistanceEncoding: ("encoded distances R", lambda _: "sin, then cos of (i - j) / 10000^(2k/d)"),
    AdditiveScore: ("scores", lambda _: "wᵀ tanh(Wq q + Wk k)"),
    AxialPositions: ("with positions", lambda _: "x + [row(pos), column(pos), ...]"),
    LSHSelfAttention: ("output", lambda _: "concat(A V) W_O; A = softmax(q·q'/|q'|) within buckets, q = x W_QK"),
    LocalSelfAttention: ("output", lambda _: "concat(A V) W_O; A = softmax(Q Kᵀ / √d_k) within near chunks"),
    FeedForward: ("feed-forward", _feed_forward),
    Residual: ("sublayer's output", _residual),
}
"""Class -> what comes out of it, and how. What attention makes inside is told by `_attention_lines`."""


def trace(model: nn.Module, inputs: dict[str, Any], **options: Any) -> list[TracedTensor]:
    """Read once, and write down every tensor on the way.

    Args:
        model: a composite: `log_probs(*inputs)` and a `head`.
        inputs: name -> tensor (or None, or a state), in the order that `log_probs` takes them.
        options: more arguments of `log_probs`.

    Returns: in the order in which they were made; inputs first, log-probabilities last. The model is left as it was.
    """
    lines = [
        TracedTensor("", name, tuple(value.shape), "input")
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    ]
    with torch.no_grad(), _watching(model, lines):
        log_probs = model.log_probs(*inputs.values(), **options)  # type: ignore[operator]
    lines.append(TracedTensor("head", "log-probabilities", tuple(log_probs.shape), _head_equation(model)))
    return lines


def folded(lines: list[TracedTensor]) -> list[TracedTensor]:
    """The same without layers that repeat the first of their stack, told in one line each time."""
    kept: list[TracedTensor] = []
    layers: dict[tuple[str, str], list[tuple[str, TracedTensor]]] = {}
    order: list[tuple[str, str] | TracedTensor] = []
    for line in lines:
        found = _LAYER.match(line.module)
        if found is None:
            order.append(line)
            continue
        key = (found[1], found[2])
        if key not in layers:
            layers[key] = []
            order.append(key)
        layers[key].append((found[3], replace(line, module="")))
    alike: dict[str, list[int]] = {}
    for place, entry in enumerate(order):
        if isinstance(entry, TracedTensor):
            kept.append(entry)
            continue
        stack, index = entry
        first = next(key for key in layers if key[0] == stack)
        if entry != first and layers[entry] == layers[first]:
            alike.setdefault(stack, []).append(int(index))
        else:
            kept += [replace(line, module=f"{stack}.{index}{rest}") for rest, line in layers[entry]]
        after = order[place + 1] if place + 1 < len(order) else None
        if stack in alike and (isinstance(after, TracedTensor | None) or after[0] != stack):
            indices = alike.pop(stack)
            names = f"{stack}.{indices[0]}" if len(indices) == 1 else f"{stack}.{indices[0]} to {indices[-1]}"
            kept.append(TracedTensor(names, f"as in {stack}.{first[1]}", (), ""))
    return kept


@contextlib.contextmanager
def _watching(model: nn.Module, lines: list[TracedTensor]) -> Iterator[None]:
    """Hooks on whatever the table knows, taken off again in any case."""
    hooks: list[Any] = []
    undo: list[Callable[[], None]] = []
    try:
        for name, module in model.named_modules():
            shown = name.removeprefix("body.")
            if isinstance(module, MultiHeadAttention | RelativeAttention):
                undo.append(_watch_attention(module, shown, lines))
            known = next((entry for kind, entry in EQUATIONS.items() if isinstance(module, kind)), None)
            if known is not None:
                # Hashed layers are called by another name than forward, which hooks do not see; their last map is not.
                called = module.out_proj if isinstance(module, LSHSelfAttention) else module
                hooks.append(called.register_forward_hook(_writer(shown, known[0], known[1](module), lines)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for function in undo:
            function()


def _writer(module: str, name: str, equation: str, lines: list[TracedTensor]) -> Callable[..., None]:
    def write(_: nn.Module, __: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor):
            lines.append(TracedTensor(module, name, tuple(tensor.shape), equation))

    return write


def _watch_attention(layer: Any, module: str, lines: list[TracedTensor]) -> Callable[[], None]:
    """Write down q, k, v, weights and output of each call of `attend`. Returns: what undoes it."""
    attend, hook = layer.attend, layer.weights_hook

    def watched(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        bias = " + b" if layer.q_proj.bias is not None else ""
        source = "memory" if "cross" in module else "[memory; x]" if k.shape[2] > q.shape[2] else "x"
        for name, tensor, equation in (
            ("queries", q, f"Q = x W_Q{bias}, in heads"),
            ("keys", k, f"K = {source} W_K{bias}, in heads"),
            ("values", v, f"V = {source} W_V{bias}, in heads"),
        ):
            lines.append(TracedTensor(module, name, tuple(tensor.shape), equation))
        if isinstance(layer, RelativeAttention):
            learned = isinstance(layer, LearnedRelativeAttention)
            equation = "a trained row a distance i - j" if learned else "r = R W_R, in heads"
            lines.append(TracedTensor(module, "distances", tuple(rest[0].shape), equation))
        out: Tensor = attend(q, k, v, *rest, **options)
        lines.append(TracedTensor(module, "output", tuple(out.shape), f"concat(A V) W_O{bias}"))
        return out

    def write_weights(weights: Tensor) -> None:
        lines.append(TracedTensor(module, "weights", tuple(weights.shape), _weights_equation(layer)))
        if hook is not None:
            hook(weights)

    layer.attend, layer.weights_hook = watched, write_weights

    def undo() -> None:
        del layer.attend  # the class's own is seen again
        layer.weights_hook = hook

    return undo


def _weights_equation(layer: Any) -> str:
    if isinstance(layer, LearnedRelativeAttention):
        return "A = softmax(((q + u)·k + q·r + b) / √d_k)"
    if isinstance(layer, RelativeAttention):
        return "A = softmax(((q + u)·k + (q + v)·r) / √d_k)"
    return "A = softmax(Q Kᵀ / √d_k)" if layer.score is None else "A = softmax(scores)"


def _head_equation(model: nn.Module) -> str:
    head = model.head
    if isinstance(head, AdaptiveHead):
        return "log P(cluster of w | x) + log P(w | cluster, x)"
    bias = " + b" if isinstance(head, LinearHead) and head.bias is not None else ""
    return f"log softmax(x Wᵀ{bias})"
