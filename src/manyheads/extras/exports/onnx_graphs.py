"""ONNX files: a module traced into a graph, two graphs merged into one with a branch, and int8 weights.

Models as plain modules, with one flat list of tensors in and out, from which ONNX graphs are made.

The sublayers are the model's own. Code that a graph cannot represent is replaced: growing tables of positions by their
formula, and caches by inputs and outputs. A masked softmax gives zeros to a query that may attend to nothing.
"""

from __future__ import annotations

import importlib
import io
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.installation import needing_extra
from manyheads.nn.attention.cache import DecoderLayerStep
from manyheads.nn.attention.masks import Causal, KeyPadding, Mask
from manyheads.nn.attention.multi_head import MultiHeadAttention, merge_heads
from manyheads.nn.attention.relative import RelativeAttention
from manyheads.nn.kernels.attention import masked_weights
from manyheads.nn.positions import NoPositions

if TYPE_CHECKING:
    from manyheads.models.composites import Seq2Seq


_OPSET = 17
MOST_BYTES = 2_000_000_000
"""The largest file: protobuf's limit is 2 GiB."""


def package(name: str) -> Any:
    """Import onnx or onnxruntime. Raises: MissingExtraError: it is not installed."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it would leave a file in the folder for temporary files
    with needing_extra(f"{name.partition('.')[0]} is not installed", "onnx"):
        return importlib.import_module(name)


def check_size(model: nn.Module) -> None:
    """Raises: ConfigError: the model does not fit into one file."""
    size = sum(one.numel() * 4 for one in model.parameters())
    if size > MOST_BYTES:
        raise ConfigError(
            f"the weights take {size / 1e9:,.1f} GB in float32, but one ONNX file holds at most"
            f" {MOST_BYTES / 1e9:,.0f} GB; use the format ctranslate2 or transformers."
        )


def traced(
    module: nn.Module,
    inputs: Mapping[str, tuple[Tensor, Sequence[str]]],
    outputs: Mapping[str, Any],
    num_single: int = 2,
) -> Any:
    """Return the graph of a module as an `onnx.ModelProto`.

    The exporter that traces is used, because the newer one takes 20 times as long (an encoder of two layers of width
    16: 44 s in place of 1.3 s). It records the branches that the example takes.

    Args:
        inputs: name -> an example, and the names of its axes; "" for an axis of fixed size.
        outputs: name -> the names of its axes.
        num_single: inputs that are parameters of `forward`; its last parameter takes a list of those that remain.
    """
    onnx = package("onnx")
    names = list(inputs)
    examples = [example for example, _ in inputs.values()]
    axes = {name: given for name, (_, given) in inputs.items()} | dict(outputs)
    file = io.BytesIO()
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exporter.setLevel(logging.ERROR)
        onednn = torch.backends.mkldnn.flags(enabled=False)  # its operations have no counterpart; it warns, too
        try:
            with onednn:
                torch.onnx.export(
                    module,
                    (*examples[:num_single], examples[num_single:]) if num_single < len(examples) else tuple(examples),
                    file,  # type: ignore[arg-type]  # its signature names no buffers, which it writes to
                    dynamo=False,
                    input_names=names,
                    output_names=list(outputs),
                    dynamic_axes={name: {i: axis for i, axis in enumerate(of) if axis} for name, of in axes.items()},
                    opset_version=_OPSET,
                )
        finally:
            exporter.setLevel(level)
    return onnx.load_model_from_string(file.getvalue())


def with_source_branch(step: Any, project: Any) -> Any:
    """Return a decoder's graph that projects the encoder's output in the first step, and takes it from the cache later.

    One `If` decides: with `use_cache_branch` the keys and values of the source are `past_key_values.*.encoder.*`,
    otherwise they are computed from `encoder_hidden_states`. The weights of the layers stand in the file once.

    Args:
        step: its inputs named `present.*.encoder.*` become the outputs of the branch.
        project: `encoder_hidden_states` -> outputs named `present.*.encoder.*`.
    """
    onnx = package("onnx")
    helper, graph = onnx.helper, step.graph
    names = [one.name for one in project.graph.output]
    taken = {one.name: one for one in graph.input if one.name in names}
    pasts = {name: name.replace("present.", "past_key_values.") for name in names}

    def renamed(name: str) -> str:
        return f"source.{name}" if name and name != "encoder_hidden_states" else name

    nodes = []
    for node in project.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = renamed(node.name)
        copy.input[:], copy.output[:] = map(renamed, node.input), map(renamed, node.output)
        nodes.append(copy)
    weights = []
    for one in project.graph.initializer:
        copy = onnx.TensorProto()
        copy.CopyFrom(one)
        copy.name = renamed(one.name)
        weights.append(copy)

    def typed(name: str, like: str) -> Any:
        value = onnx.ValueInfoProto()
        value.CopyFrom(taken[like])
        value.name = name
        return value

    computed = helper.make_graph(
        nodes, "project_source", [], [typed(renamed(name), name) for name in names], initializer=weights
    )
    kept_nodes = [helper.make_node("Identity", [pasts[name]], [f"kept.{name}"]) for name in names]
    kept = helper.make_graph(kept_nodes, "keep_source", [], [typed(f"kept.{name}", name) for name in names])
    branch = helper.make_node("If", ["use_cache_branch"], names, "source", then_branch=kept, else_branch=computed)
    given = [typed(pasts[one.name], one.name) if one.name in taken else one for one in graph.input]
    given.insert(2, _value(onnx, project.graph.input[0]))
    given.append(helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1]))
    outputs = [*graph.output, *(typed(name, name) for name in names)]
    outputs.sort(key=lambda one: _order(one.name))
    whole = helper.make_graph([branch, *graph.node], "decoder", given, outputs, initializer=graph.initializer)
    opsets = {one.domain: one for one in (*project.opset_import, *step.opset_import)}
    model = helper.make_model(whole, opset_imports=list(opsets.values()), ir_version=step.ir_version)
    onnx.checker.check_model(model)
    return model


def _value(onnx: Any, value: Any) -> Any:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    return copy


def _order(name: str) -> tuple[int, str]:
    """The logits, then layer by layer: the decoder's keys and values, the encoder's."""
    parts = name.split(".")
    return (int(parts[1]), ".".join(parts[2:])) if parts[0] == "present" else (-1, name)


def quantized(model: Any) -> Any:
    """Return a graph with matrices of int8, a scale for each column; activations are quantized as they are computed.

    Seven bits are used, so that processors without VNNI do not overflow.
    """
    tools = package("onnxruntime.quantization")
    preparing = logging.getLogger()
    level = preparing.level
    preparing.setLevel(logging.ERROR)  # it recommends a preparation on the root logger, which changes nothing here
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tools.quantize_dynamic(
                model, folder / "model.onnx", weight_type=tools.QuantType.QInt8, per_channel=True, reduce_range=True
            )
            return package("onnx").load(folder / "model.onnx")
    finally:
        preparing.setLevel(level)


def save(model: Any, path: Path) -> None:
    """Write a graph. The file's metadata names no machine."""
    onnx = package("onnx")
    model.producer_name, model.doc_string = "manyheads", ""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save_model(model, path)


def prepare(model: nn.Module) -> None:
    """Make all attention layers compute their weights explicitly instead of by SDPA, in evaluation mode: in ONNX, SDPA
    gives NaN for an empty row."""
    model.eval()
    for module in model.modules():
        attention: Any = module
        if getattr(module, "kind", None) == MultiHeadAttention.kind:
            attention.weights_hook = lambda weights: None
        if getattr(module, "kind", None) == RelativeAttention.kind:
            attention.attend = partial(_attend_by_distance, attention)


def _attend_by_distance(
    attention: RelativeAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    distance_bias: Tensor | None,
    mask: Mask | None,
) -> Tensor:
    """`RelativeAttention.attend` with the scores of distances gathered, because views that shift them have fixed sizes.

    Dai et al. 2019, sec. 3.3. Column k_len - 1 - d of the distances' scores belongs to distance d.
    """
    q_len, k_len = q.shape[2], k.shape[2]
    by_content = torch.matmul(q + attention.content_bias[:, None], k.transpose(-1, -2))
    if attention.position_bias is not None:
        q = q + attention.position_bias[:, None]
    by_distance = torch.matmul(q, positions.transpose(-1, -2))
    scale = attention.head_dim**-0.5
    if distance_bias is not None:
        by_distance = by_distance + distance_bias[:, None]
    queries = torch.arange(k_len - q_len, k_len)
    columns = (k_len - 1 - queries[:, None] + torch.arange(k_len)).clamp(max=k_len - 1)
    shifted = by_distance.gather(3, columns.expand(q.shape[0], q.shape[1], q_len, k_len))
    weights = masked_weights((by_content + shifted) * scale, mask, k_len - q_len)
    return attention.out_proj(merge_heads(torch.matmul(weights, v)))  # type: ignore[no-any-return]


def graph_positions(module: nn.Module, first: int, length: int, like: Tensor) -> Tensor:
    """Return the addends of positions first, first + 1, ...: (length, d_model).

    Args: module: `SinusoidalPositions`, `LearnedPositions` or `NoPositions`.
    """
    if isinstance(module, NoPositions):
        return torch.zeros(1, 1)
    places = torch.arange(first, first + length, device=like.device)
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return weight[places]
    return sinusoidal(places, module.d_model, module.layout)  # type: ignore[arg-type]


def sinusoidal(places: Tensor, d_model: int, layout: str) -> Tensor:
    """As `nn.positions.sinusoidal_table`, for positions below 65,536, without float64, which browsers do not have.

    A position is 256 times a high number plus a low one; sines of sums follow from tables of both, computed in float64.
    """
    frequency = np.exp(np.arange(0, d_model, 2) * (-math.log(10_000.0) / d_model))
    angle = np.arange(256)[:, None] * frequency
    high, low = torch.div(places, 256, rounding_mode="floor"), places % 256
    tables = (np.sin(256 * angle), np.cos(256 * angle), np.sin(angle), np.cos(angle))
    high_sine, high_cosine, low_sine, low_cosine = (torch.from_numpy(one.astype(np.float32)) for one in tables)
    sine = high_sine[high] * low_cosine[low] + high_cosine[high] * low_sine[low]
    cosine = high_cosine[high] * low_cosine[low] - high_sine[high] * low_sine[low]
    if layout == "halves":
        return torch.cat([sine, cosine[:, : d_model // 2]], dim=1)
    return torch.stack([sine, cosine], dim=2).flatten(1)[:, :d_model]


class Past:
    """One layer's keys and values of earlier positions, in the interface of `CacheStep`; new ones are appended.

    Shape: key, value (rows, heads, past_len, head_dim).
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value, self.length = key, value, key.shape[2]

    def write(self, key: Tensor, value: Tensor) -> Past:
        """Append the new positions."""
        self.key, self.value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        return self

    def among_real(self, mask: Mask | None) -> Mask | None:
        """All keys are real."""
        return mask

    def shared(self) -> None:
        """No rows share keys."""

    def filled(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values."""
        return self.key, self.value


class EncoderGraph(nn.Module):
    """input_ids, attention_mask (batch, source_len) -> last_hidden_state (batch, source_len, d_model)."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.body = model.body

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        body = self.body
        x = body.source_embedding(input_ids)
        x = x + graph_positions(body.source_positions, 0, input_ids.shape[1], x)
        return body.encoder(x, KeyPadding(attention_mask.bool()))  # type: ignore[no-any-return]


class CrossProjections(nn.Module):
    """encoder_hidden_states -> keys and values of each decoder layer's attention to the source."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.body = model.body

    def forward(self, encoder_hidden_states: Tensor) -> tuple[Tensor, ...]:
        pairs = [layer.cross_attn.project_memory(encoder_hidden_states) for layer in self.body.decoder.layers]
        return tuple(one for pair in pairs for one in pair)


class DecoderStep(nn.Module):
    """The next target positions: logits, and the keys and values of all positions.

    Shape: encoder_attention_mask (rows, source_len); input_ids (rows, new_len); past: for each layer own keys, own
        values, keys of the source, values of the source. Returns: logits (rows, new_len, vocab_size), then each layer's
        own keys and values.
    """

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.body, self.head = model.body, model.head

    def forward(self, encoder_attention_mask: Tensor, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        body: Any = self.body
        layers = [
            DecoderLayerStep(Past(*past[first : first + 2]), *past[first + 2 : first + 4])  # type: ignore[arg-type]
            for first in range(0, len(past), 4)
        ]
        x = body.target_embedding(input_ids)
        x = x + graph_positions(body.target_positions, past[0].shape[2], input_ids.shape[1], x)
        hidden = body.decoder.step(x, tuple(layers), Causal(), KeyPadding(encoder_attention_mask.bool()))
        presents = [one for layer in layers for one in layer.past.filled()]
        return self.head.logits(hidden), *presents


def logits_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """Return a head's logits, or its log-probabilities if it is adaptive."""
    score: Any = head.log_probs if hasattr(head, "clusters") else head.logits
    return cast(Tensor, score(hidden))
