"""The operations of one attention layer in order, with the shapes of what they make (figure 2 of "Attention is all you
need", for every kind of attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from manyheads.extras.inspect.block_facts import attention_name
from manyheads.extras.inspect.tracing import TracedTensor
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.relative import LearnedRelativeAttention, RelativeAttention

__all__ = ["AttentionOperations", "Operation", "operations_of"]

_PADDING, _CAUSAL, _SOME = "no padding", "no later positions", "masked layers"


@dataclass(frozen=True)
class Operation:
    """A box. name: what is done; formula: with the letters of the inputs; shape: of the result, without the batch."""

    name: str
    formula: str = ""
    shape: str = ""


@dataclass(frozen=True)
class AttentionOperations:
    """A kind of attention. kind: its name. places: its layers; the sizes are those of the first one. num_heads: of this
    one. inputs: letters, the values last. projections: how each input is made, in the order of `inputs`. steps: from
    inputs to the result of one head; the last that reads values is `value_step`. output: after the heads.
    n: positions of the queries, m: of the keys.
    """

    kind: str
    places: tuple[str, ...]
    num_heads: int
    inputs: tuple[str, ...]
    projections: tuple[Operation, ...]
    steps: tuple[Operation, ...]
    value_step: int
    output: tuple[Operation, ...]
    has_other_sizes: bool = False

    def with_place(self, other: AttentionOperations) -> AttentionOperations:
        """Return these operations with another layer that has them."""
        sizes, others = (tuple(one.shape for one in which.projections) for which in (self, other))
        masks = {one.formula for one in (*self.steps, *other.steps) if one.name == "Mask"}
        steps = self.steps
        if len(masks) > 1:
            mask = f"{_PADDING}; in {_SOME} {_CAUSAL}"
            steps = tuple(replace(one, formula=mask) if one.name == "Mask" else one for one in steps)
        return replace(
            self,
            places=(*self.places, *other.places),
            steps=steps,
            has_other_sizes=self.has_other_sizes or sizes != others,
        )


def operations_of(
    name: str, module: nn.Module, tensors: Sequence[TracedTensor], *, is_masked: bool, has_memory: bool = False
) -> AttentionOperations:
    """Return the operations of a layer that ran.

    Args: name: of the layer. tensors: what it made. is_masked: whether no position attended to a later one. has_memory:
        whether its keys and values are of a memory, too.
    """
    layer: Any = module
    made = {line.name.partition(",")[0]: line for line in tensors}
    is_cross = "cross" in name
    heads, head_dim = made["queries"].shape[1], made["queries"].shape[3]
    value_dim, d_model = made["values"].shape[-1], made["output"].shape[-1]
    keys = "n" if isinstance(layer, LSHSelfAttention | LocalSelfAttention) else "m"
    letters = _letters(layer)
    projections = []
    for letter in letters:
        rows = "n" if letter in ("Q", "QK") else keys
        width = value_dim if letter == "V" else head_dim
        source = "the encoder's output" if is_cross else "memory and x" if has_memory else "x"
        source = {"Q": "x", "QK": "x", "r": "distances R"}.get(letter, source)
        projections.append(Operation("Linear", source, f"{heads} x {rows} x {width}"))
    steps, value_step = _steps(layer, made, is_masked, f"{heads} x", head_dim, value_dim)
    return AttentionOperations(
        kind=attention_name(layer, is_masked=False),
        places=(name,),
        num_heads=heads,
        inputs=letters,
        projections=tuple(projections),
        steps=steps,
        value_step=value_step,
        output=(Operation("Concat", "", f"n x {heads * value_dim}"), Operation("Linear", "", f"n x {d_model}")),
    )


def _letters(layer: Any) -> tuple[str, ...]:
    if isinstance(layer, LSHSelfAttention):
        return ("QK", "V")
    if isinstance(layer, RelativeAttention) and not isinstance(layer, LearnedRelativeAttention):
        return ("Q", "K", "r", "V")
    return ("Q", "K", "V")


def _steps(
    layer: Any, made: dict[str, TracedTensor], is_masked: bool, heads: str, head_dim: int, value_dim: int
) -> tuple[tuple[Operation, ...], int]:
    """Return the operations of one head, and which of them reads the values."""
    if isinstance(layer, LSHSelfAttention):
        before, square, after = _hashing(layer, made, heads)
    elif isinstance(layer, LocalSelfAttention):
        before, square, after = _chunking(layer, heads)
    else:
        before, square, after = [], f"{heads} n x m", []
    steps = [*before, *_scores(layer, square, head_dim)]
    limits = _limits(layer, is_masked)
    if limits:
        steps.append(Operation("Mask", limits, square))
    rounds = ", in each round" if "buckets" in made else ""
    steps.append(Operation("Softmax", f"over the keys{rounds}", square))
    steps.append(Operation("MatMul", "A V", f"{square.rpartition(' x ')[0]} x {value_dim}"))
    return (*steps, *after), len(steps) - 1


def _scores(layer: Any, square: str, head_dim: int) -> Iterator[Operation]:
    if isinstance(layer, LSHSelfAttention):
        yield Operation("MatMul", "Q Kᵀ", square)
        if layer.settings.scale != 1:
            yield Operation("Scale", f"· {layer.settings.scale:g}", square)
        return
    if isinstance(layer, LearnedRelativeAttention):
        yield Operation("MatMul", "(Q + u) Kᵀ", square)
        yield Operation("Add distances", "Q r + b, trained for each i - j", square)
    elif isinstance(layer, RelativeAttention):
        yield Operation("MatMul", "(Q + u) Kᵀ, by content", square)
        yield Operation("MatMul, shift, add", "(Q + v) rᵀ, by distance i - j", square)
    elif getattr(layer, "score", None) is not None:
        formula = "wᵀ tanh(W_q Q + W_k K)" if type(layer.score).__name__ == "AdditiveScore" else "score(Q, K)"
        yield Operation(type(layer.score).__name__.replace("Score", " score"), formula, square)
        return
    else:
        yield Operation("MatMul", "Q Kᵀ", square)
    yield Operation("Scale", f"1 / √{head_dim}", square)
    if getattr(layer, "relative_bias", None) is not None:
        yield Operation("Add distances", "+ a trained number for each head and j - i", square)
    if isinstance(layer, LocalSelfAttention) and layer.sloped:
        penalty = "slope |i - j|, a slope for each head"
        if layer.distance_penalties is not None:
            penalty = "a trained number for each head and |i - j|"
        yield Operation("Add distances", f"- {penalty}", square)


def _limits(layer: Any, is_masked: bool) -> str:
    """Return which keys a query sees, beside padding."""
    causal = _CAUSAL if is_masked else ""
    if isinstance(layer, LSHSelfAttention):
        own = "itself only if there is nothing else"
        bucket = "its own bucket" if layer.settings.num_hashes and layer.settings.within_bucket else ""
        return "; ".join(part for part in (causal, bucket, own) if part)
    return causal or _PADDING


def _hashing(
    layer: LSHSelfAttention, made: dict[str, TracedTensor], heads: str
) -> tuple[list[Operation], str, list[Operation]]:
    settings = layer.settings
    norm = Operation("Normalise", "K = Q / |Q|", f"{heads} n x {layer.head_dim}")
    if "buckets" not in made:
        return [norm], f"{heads} n x n", []
    rounds = made["buckets"].shape[2]
    seen = settings.chunk_len * (1 + settings.chunks_before + settings.chunks_after)
    where = f"chunks of {settings.chunk_len}: {_neighbours(settings)}"
    if settings.visible == "bucket":
        seen, where = settings.chunk_len, f"the last {settings.chunk_len} of Q's bucket"
    square = f"{heads} {rounds} x n x {seen}"
    # `argmax` over the products with rotations and their negatives; see `equations`.
    formula = made["buckets"].equation.removesuffix(", in each round")
    before = [
        norm,
        Operation("Hash", formula, f"{heads} {rounds} x n"),
        Operation("Sort", "by bucket, then position", f"{heads} {rounds} x n"),
        Operation("Cut", where, square.replace(f"n x {seen}", f"n x {layer.head_dim}")),
    ]
    after = [Operation("Undo the sort, add rounds", "weighted by each round's sum", f"{heads} n x {layer.head_dim}")]
    return before, square, after


def _chunking(layer: LocalSelfAttention, heads: str) -> tuple[list[Operation], str, list[Operation]]:
    seen = layer.chunk_len * (1 + layer.chunks_before + layer.chunks_after)
    cut = Operation("Cut", f"chunks of {layer.chunk_len}: {_neighbours(layer)}", f"{heads} n x {layer.head_dim}")
    return [cut], f"{heads} n x {seen}", [Operation("Join the chunks", "", f"{heads} n x {layer.head_dim}")]


def _neighbours(settings: Any) -> str:
    near = [
        f"{count} {side}"
        for count, side in ((settings.chunks_before, "before"), (settings.chunks_after, "after"))
        if count
    ]
    return " and ".join(["its own", *near])
