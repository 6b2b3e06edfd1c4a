"""The kind, name and sizes of one module of a model, as the drawing of its blocks shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from manyheads.extras.classification.pooling import TextPooling
from manyheads.extras.inspect.tracing import TracedTensor
from manyheads.extras.parsing.span_head import SpanHead
from manyheads.nn.attention.additive import AdditiveScore
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import DistanceEncoding, LearnedRelativeAttention, RelativeAttention
from manyheads.nn.embedding import FeatureEmbedding, TokenEmbedding
from manyheads.nn.feed_forward import FeedForward
from manyheads.nn.heads.adaptive import AdaptiveEmbedding, AdaptiveHead
from manyheads.nn.norm import UnbiasedLayerNorm
from manyheads.nn.positions import AxialPositions, LearnedPositions, SinusoidalPositions

__all__ = ["Facts", "attention_name", "block_facts", "matrices_of"]


@dataclass(frozen=True)
class Facts:
    """A module. template: its lines, separated by line breaks, with the names of `sizes` in braces. sizes: name -> the
    smallest and the largest value in the layers that are shown together. place: the module's name. shape: of its
    output, without the batch.
    """

    kind: str
    name: str
    template: str
    sizes: tuple[tuple[str, int, int], ...]
    place: str = ""
    shape: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The template with its sizes."""
        values = {name: f"{low:,}" if low == high else f"{low:,} to {high:,}" for name, low, high in self.sizes}
        return tuple(line for line in self.template.format(**values).split("\n") if line)

    @classmethod
    def merged(cls, same: Sequence[Facts]) -> Facts:
        """Return the facts of layers of one structure, which may have other sizes."""
        sizes = tuple(
            (rows[0][0], min(low for _, low, _ in rows), max(high for _, _, high in rows))
            for rows in zip(*(facts.sizes for facts in same), strict=True)
        )
        return replace(same[0], sizes=sizes)


def _facts(kind: str, name: str, template: str = "", **sizes: int) -> Facts:
    return Facts(kind, name, template, tuple((key, value, value) for key, value in sizes.items()))


def matrices_of(model: nn.Module) -> dict[int, str]:
    """Return the matrices that embeddings and output share: id of the parameter -> a letter."""
    uses: dict[int, int] = {}
    for module in model.modules():
        if (matrix := getattr(module, "token_table", None)) is not None:
            uses[id(matrix)] = uses.get(id(matrix), 0) + 1
    shared = [one for one, count in uses.items() if count > 1]
    return dict(zip(shared, "EFG", strict=False))


def block_facts(
    model: Any,
    name: str,
    module: nn.Module,
    tensors: Sequence[TracedTensor],
    matrices: Mapping[int, str],
    *,
    is_masked: bool = False,
) -> Facts:
    """Return the facts of a module that ran. tensors: what it made, at least one. matrices: of `matrices_of`."""
    made = tensors[-1].shape
    width = made[-1]
    if name == "head":
        facts = _head(module, width)
    elif isinstance(module, TokenEmbedding | AdaptiveEmbedding):
        facts = _embedding(module, width)
    elif isinstance(module, FeatureEmbedding):
        rows = module.num_embeddings
        facts = _facts("embedding", "Sum of features", "{rows} features x {width}", rows=rows, width=width)
    elif isinstance(module, FeedForward):
        facts = _feed_forward(model, name, module)
    elif isinstance(module, MultiHeadAttention | RelativeAttention | LSHSelfAttention | LocalSelfAttention):
        facts = _attention(module, tensors, is_masked)
    elif isinstance(module, TextPooling):
        facts = _facts("pooling", "Pooling", tensors[-1].equation)
    elif isinstance(module, nn.Linear):
        words, wide = module.in_features // width, module.in_features
        template = "{words} words side by side\n{wide} → {width}, ReLU, added"
        facts = _facts("feed-forward", "Window", template, words=words, wide=wide, width=width)
    elif isinstance(module, nn.LayerNorm | UnbiasedLayerNorm):
        facts = _facts("norm", "Norm", tensors[-1].equation.replace("LN(x)", ""))
    else:
        facts = _positions(module)
    if letter := matrices.get(id(getattr(module, "token_table", None))):
        facts = replace(facts, template=f"{facts.template}\nmatrix {letter}, shared")
    shape = f"n x {width:,}" if len(made) > 2 else f"{width:,}"
    return replace(facts, place=name, shape=shape)


def attention_name(module: nn.Module, *, is_masked: bool) -> str:
    """Return what kind of attention a layer computes."""
    if isinstance(module, LSHSelfAttention):
        name = "LSH attention" if module.settings.num_hashes else "full attention, shared Q and K"
    elif isinstance(module, LocalSelfAttention):
        name = "local attention"
    elif isinstance(module, RelativeAttention):
        name = "relative attention"
    else:
        name = "multi-head attention"
    name = f"masked {name}" if is_masked else name
    return name[0].upper() + name[1:]


def _attention(module: Any, tensors: Sequence[TracedTensor], is_masked: bool) -> Facts:
    shapes = {line.name.partition(",")[0]: line.shape for line in tensors}
    _, heads, _, head_dim = shapes["queries"]
    value_dim = shapes["values"][-1]
    sizes = {"heads": heads, "head_dim": head_dim}
    template = "{heads} heads of {head_dim}"
    if value_dim != head_dim:
        template, sizes = f"{template}, values {{value_dim}}", {**sizes, "value_dim": value_dim}
    if isinstance(module, LSHSelfAttention):
        settings = module.settings
        if settings.num_hashes:
            template += "\n{rounds} rounds, {buckets} buckets, {seen}"
            template = template.replace(
                "{seen}", "chunks of {chunk}" if settings.visible == "chunk" else "{chunk} keys each"
            )
            sizes |= {"rounds": settings.num_hashes, "buckets": module.num_buckets, "chunk": settings.chunk_len}
    elif isinstance(module, LocalSelfAttention):
        template += "\nchunks of {chunk}: its own, {before} before, {after} after"
        if module.sloped:
            trained = module.distance_penalties is not None
            template += "\ntrained penalties for distances" if trained else "\nscores fall with the distance"
        sizes |= {"chunk": module.chunk_len, "before": module.chunks_before, "after": module.chunks_after}
    elif isinstance(module, LearnedRelativeAttention):
        template += "\na trained vector for each of {distances} distances"
        sizes["distances"] = module.max_len
    elif isinstance(module, RelativeAttention):
        template += "\ndistances: sinusoids"
    elif isinstance(module.score, AdditiveScore):
        template += "\nadditive score"
    elif module.score is not None:
        template += f"\nscore: {type(module.score).__name__}"
    if getattr(module, "relative_bias", None) is not None:
        template += "\na trained number for each distance"
    return _facts("attention", attention_name(module, is_masked=is_masked), template, **sizes)


def _feed_forward(model: Any, name: str, module: FeedForward) -> Facts:
    parent = dict(model.named_modules()).get(f"body.{name.rpartition('.')[0]}")
    chunk_len = module.chunk_len or getattr(parent, "chunk_len", 0)
    activation = {"relu": "ReLU", "gelu": "GELU"}.get(module.activation, module.activation.replace("_", " "))
    template = f"{{outer}} → {{inner}} → {{outer}}, {activation}"
    sizes = {"outer": module.in_proj.in_features, "inner": module.in_proj.out_features}
    if chunk_len:
        template, sizes = f"{template}\n{{chunk}} positions at once", {**sizes, "chunk": chunk_len}
    return _facts("feed-forward", "Feed-forward", template, **sizes)


def _embedding(module: TokenEmbedding | AdaptiveEmbedding, width: int) -> Facts:
    scale = ", times √{width}" if module.scale != 1.0 else ""
    if isinstance(module, TokenEmbedding):
        return _facts(
            "embedding", "Embedding", f"{{rows}} tokens x {{width}}{scale}", rows=module.num_embeddings, width=width
        )
    if len(module.tables) == 1:
        table = module.tables[0]
        projected = f" → {width:,}" if module.projections is not None else ""
        template = f"{{rows}} tokens x {{narrow}}{projected}{scale}"
        return _facts("embedding", "Embedding", template, rows=table.shape[0], narrow=table.shape[1], width=width)
    parts = "\n".join(f"{table.shape[0]:,} tokens x {table.shape[1]:,} → {width:,}" for table in module.tables)
    return _facts("embedding", "Adaptive embedding", f"{parts}\ntimes √{{width}}", width=width)


def _positions(module: nn.Module) -> Facts:
    if isinstance(module, SinusoidalPositions):
        layout = "" if module.layout == "interleaved" else "all sines first"
        return _facts("positions", "Sinusoidal positions", layout)
    if isinstance(module, LearnedPositions):
        return _facts("positions", "Trained positions", "{rows} positions", rows=module.max_len)
    if isinstance(module, AxialPositions):
        grid, dims = " x ".join(map(str, module.shape)), " + ".join(map(str, module.dims))
        return _facts("positions", "Axial positions", f"grid {grid}, widths {dims}")
    if isinstance(module, DistanceEncoding):
        return _facts("positions", "Distances", "sinusoids of i - j")
    return _facts("other", type(module).__name__)


def _head(module: Any, width: int) -> Facts:
    if isinstance(module, AdaptiveHead):
        parts = [f"{high - low:,}" for low, high in module.clusters.ranges]
        return _facts("head", "Adaptive softmax", f"clusters of {', '.join(parts)}" if len(parts) > 1 else "")
    if isinstance(module, SpanHead):
        rows, inner = module.label_proj.weight.shape
        template = "differences of fenceposts\n{columns} → {inner} → {rows}, ReLU"
        columns = module.fence_proj.in_features
        return _facts("head", "Spans, softmax", template, columns=columns, inner=inner, rows=rows)
    rows, columns = module.weight.shape
    bias = " + bias" if module.bias is not None else ""
    return _facts("head", "Linear, softmax", f"{{columns}} → {{rows}}{bias}", rows=rows, columns=columns)
