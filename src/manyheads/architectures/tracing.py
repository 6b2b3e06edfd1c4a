"""Every tensor of one forward pass, from input to output, with its equation."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.architectures.tracing_reformer import JOINED, STREAMS, watch_hashed, watch_local
from manyheads.architectures.transformer.model import Decoder, Encoder
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

_LAYER = re.compile(r"^(.*?layers)\.(\d+)(.*)$")


@dataclass(frozen=True)
class TracedTensor:
    """One line: the module, the tensor's name, its shape, and its equation."""

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
    SinusoidalPositions: ("with positions", _sinusoid),
    LearnedPositions: ("with positions", lambda _: "x + P[pos]"),
    DistanceEncoding: ("encoded distances R", lambda _: "sin, then cos of (i - j) / 10000^(2k/d)"),
    AdditiveScore: ("scores", lambda _: "wᵀ tanh(Wq q + Wk k)"),
    AxialPositions: ("with positions", _axial),
    FeedForward: ("feed-forward", _feed_forward),
    Residual: ("sublayer's output", _residual),
}
"""Class -> what comes out of it, and how. What attention makes inside is told by those that watch it."""

LAST_NORMS: dict[type[nn.Module], Mapping[str, tuple[str, str]]] = {
    Encoder: {"norm": ("memory", "LN(x)")},
    Decoder: {"norm": ("hidden states", "LN(x)")},
    **JOINED,
}
"""Stack -> name of the norm behind its layers, where it has one -> what comes out, and how."""


def trace(model: nn.Module, inputs: dict[str, Any], **options: Any) -> list[TracedTensor]:
    """Run one forward pass and record every tensor.

    Args:
        model: a composite: `log_probs(*inputs)` and a `head`.
        inputs: name -> tensor (or None, or a state), in the order of the arguments of `log_probs`.
        options: further arguments of `log_probs`.

    Returns: in the order of computation; inputs first, log-probabilities last. The model is not changed.
    """
    lines = [
        TracedTensor("", name, tuple(value.shape), "input")
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    ]
    with torch.no_grad(), _watching(model, lines):
        log_probs = model.log_probs(*inputs.values(), **options)  # type: ignore[operator]
    lines.append(TracedTensor("head", "log-probabilities", tuple(log_probs.shape), _head_equation(model)))
    return _chunks_joined(lines)


def _chunks_joined(lines: list[TracedTensor]) -> list[TracedTensor]:
    """Merge tensors that were computed in several calls, some positions at a time, into one line."""
    found: dict[tuple[str, str], list[TracedTensor]] = {}
    for line in lines:
        found.setdefault((line.module, line.name), []).append(line)
    joined = []
    for first, *others in found.values():
        if others:
            batch, some, *rest = first.shape
            length = some + sum(other.shape[1] for other in others)
            told = f"{first.equation}; {some} positions at a time"
            first = replace(first, shape=(batch, length, *rest), equation=told)
        joined.append(first)
    return joined


def folded(lines: list[TracedTensor]) -> list[TracedTensor]:
    """Replace layers that repeat an earlier one of their stack by one line after it."""
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
        model = next(key for key in layers if key[0] == stack and layers[key] == layers[entry])
        if entry != model:
            alike.setdefault(model[1], []).append(int(index))
        else:
            kept += [replace(line, module=f"{stack}.{index}{rest}") for rest, line in layers[entry]]
        after = order[place + 1] if place + 1 < len(order) else None
        if isinstance(after, TracedTensor | None) or after[0] != stack:
            for first, indices in alike.items():
                kept.append(TracedTensor(f"{stack}.{_runs(indices)}", f"as in {stack}.{first}", (), ""))
            alike = {}
    return kept


def _runs(numbers: list[int]) -> str:
    """Return increasing numbers as text: [1, 2, 3, 5, 7, 8] as `1 to 3, 5, 7 to 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


@contextlib.contextmanager
def _watching(model: nn.Module, lines: list[TracedTensor]) -> Iterator[None]:
    """Add hooks to all modules in the table, and remove them after the block."""
    hooks: list[Any] = []
    undo: list[Callable[[], None]] = []
    try:
        for name, module in model.named_modules():
            shown = name.removeprefix("body.")
            if isinstance(module, MultiHeadAttention | RelativeAttention):
                undo.append(_watch_attention(module, shown, lines))
            elif isinstance(module, LSHSelfAttention):
                undo.append(watch_hashed(module, partial(_write, lines, shown)))
            elif isinstance(module, LocalSelfAttention):
                undo.append(watch_local(module, partial(_write, lines, shown)))
            for inner, label, equation in _told_of(name, module):
                called = model.get_submodule(inner)
                hooks.append(called.register_forward_hook(_writer(inner.removeprefix("body."), label, equation, lines)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for function in undo:
            function()


def _told_of(name: str, module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield modules whose outputs get a line because of this module: full name, tensor name, equation."""
    known = next((entry for kind, entry in EQUATIONS.items() if isinstance(module, kind)), None)
    if known is not None:
        yield name, known[0], known[1](module)
    if type(module) in STREAMS:
        yield name, "changed stream", STREAMS[type(module)]
    for norm, (label, equation) in LAST_NORMS.get(type(module), {}).items():
        if getattr(module, norm) is not None:
            yield f"{name}.{norm}", label, equation


def _write(lines: list[TracedTensor], module: str, name: str, shape: tuple[int, ...], equation: str) -> None:
    lines.append(TracedTensor(module, name, tuple(shape), equation))


def _writer(module: str, name: str, equation: str, lines: list[TracedTensor]) -> Callable[..., None]:
    def write(_: nn.Module, __: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor):
            lines.append(TracedTensor(module, name, tuple(tensor.shape), equation))

    return write


def _watch_attention(layer: Any, module: str, lines: list[TracedTensor]) -> Callable[[], None]:
    """Record q, k, v, weights and output of each call of `attend`. Returns: a function that undoes it."""
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
            equation = "a trained row per distance i - j" if learned else "r = R W_R, in heads"
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
        del layer.attend  # restores the class's method
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
