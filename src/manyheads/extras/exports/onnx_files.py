"""ONNX files: a module traced into a graph, two graphs merged into one with a branch, and int8 weights."""

from __future__ import annotations

import importlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.installation import needing_extra

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
