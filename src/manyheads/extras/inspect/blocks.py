"""The blocks of a model and the operations of its attention, as figures 1 and 2 of a paper draw them.

The model is run once. The order of the blocks is the order in which they ran; names and sizes are what the modules say
of themselves (`facts`, `operations`). Attention is called masked if no position attended to a later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manyheads.extras.inspect.tracing import LAYER, TracedTensor, trace
from manyheads.nn.attention.observing import observe

_MOST_EXAMPLE_TOKENS = 2048


@dataclass(frozen=True)
class Block:
    """A box. lines: what is known of it. shape: of its output, without the batch; n is the number of tokens. wiring: of
    a sublayer f: `post`: LN(x + f(x)); `pre`: x + f(LN(x)); `reversible`: one of two streams gets f(LN(the other)).
    is_cross: it also reads the encoder's output.
    """

    name: str
    lines: tuple[str, ...] = ()
    shape: str = ""
    wiring: str | None = None
    is_cross: bool = False


@dataclass(frozen=True)
class LayerKind:
    """Layers of one structure. layers: their numbers from 1. blocks: their sublayers, from input to output."""

    layers: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Stack:
    """One column. name: `encoder`, `decoder`, or empty. before, after: blocks around the layers, from input to output.
    sides: what all layers read besides: memory and distances.
    """

    name: str
    reads: str
    before: tuple[Block, ...]
    kinds: tuple[LayerKind, ...]
    after: tuple[Block, ...]
    sides: tuple[Block, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of layers of all kinds."""
        return sum(len(kind.layers) for kind in self.kinds)


@dataclass(frozen=True)
class AttentionOperations:
    """A kind of attention. places: its layers; the sizes are those of the first one. inputs: letter, what it is made of
    and shape, the values last. steps: what a head does, and the formulas; the last `MatMul` reads the values. Shapes
    are heads x length x width; n: positions of the queries, m: of the keys.
    """

    kind: str
    places: tuple[str, ...]
    num_heads: int
    d_model: int
    inputs: tuple[tuple[str, str, str], ...]
    steps: tuple[tuple[str, str], ...]
    has_other_sizes: bool


@dataclass(frozen=True)
class ModelBlocks:
    """A model. title: its sizes in words. output: what follows the last stack. result: what the output is."""

    architecture: str
    title: str
    stacks: tuple[Stack, ...]
    output: tuple[Block, ...]
    result: str
    operations: tuple[AttentionOperations, ...] = ()


_RESULTS = {"classification": "probabilities of the labels", "spans": "probabilities of the labels of each span"}
_READS = {"encoder": "source tokens", "decoder": "target tokens, shifted right"}


def blocks_of(model: Any) -> ModelBlocks:
    """Run a composite on a few tokens and return its blocks.

    Args: model: a composite, in evaluation mode, on any device. Raises: as the model's forward.
    """
    inputs = example_inputs(model)
    traced: dict[str, list[TracedTensor]] = {}
    for line in trace(model, inputs):
        traced.setdefault(line.module, []).append(line)
    traced.pop("", None)
    masked = _masked_layers(model, inputs)
    modules = {name.removeprefix("body."): module for name, module in model.named_modules()}
    memory_len = int(getattr(model.config, "context_settings", {}).get("memory_len", 0))
    tables = [id(module.token_table) for module in modules.values() if hasattr(module, "token_table")]
    letters = dict(zip((one for one in dict.fromkeys(tables) if tables.count(one) > 1), "EFG", strict=False))
    is_relative = any("r" in getattr(module, "inputs", ()) for module in modules.values())
    columns = ("encoder", "decoder") if "target_embedding" in traced else ("",)
    before: dict[str, list[Block]] = {name: [] for name in columns}
    layers: dict[str, dict[int, list[Block]]] = {name: {} for name in columns}
    after: dict[str, list[Block]] = {name: [] for name in columns}
    sides, output = _memory(model, memory_len), []
    pending = no_heads = Block("No heads are left", ("the layer is its residual",))
    for name, tensors in traced.items():
        module, layer = modules[name], LAYER.match(name)
        column = columns[0] if name.startswith(("source", "encoder")) else columns[-1]
        if layer is not None and (wiring := getattr(module, "wiring", None)):
            layers[column].setdefault(int(layer[2]) + 1, []).append(replace(pending, wiring=wiring))
            pending = no_heads
            continue
        block = _block(name, module, tensors, letters.get(id(getattr(module, "token_table", None))), name in masked)
        if name in ("head", "pooling"):
            output.append(block)
        elif block.name == "Distances" and is_relative:
            sides.append(block)
        elif layer is None:
            (after if layers[column] else before)[column].append(block)
        else:
            pending = block
    stacks = []
    for name in columns:
        alike: dict[tuple[Block, ...], list[int]] = {}
        for number, blocks in layers[name].items():
            alike.setdefault(tuple(blocks), []).append(number)
        kinds = tuple(LayerKind(tuple(numbers), blocks) for blocks, numbers in alike.items())
        beside = tuple(sides) if name == columns[-1] else ()
        reads = _READS.get(name, "tokens")
        stacks.append(Stack(name, reads, tuple(before[name]), kinds, tuple(after[name]), beside))
    return ModelBlocks(
        architecture=model.config.architecture,
        title=model.config.describe(),
        stacks=tuple(stacks),
        output=tuple(output),
        result=_RESULTS.get(model.config.task, "probabilities of the next token"),
        operations=_operations(modules, traced, masked, has_memory=memory_len > 0),
    )


def _block(name: str, module: Any, tensors: Sequence[TracedTensor], letter: str | None, is_masked: bool) -> Block:
    """Return a box. letter: of a matrix that the module shares with another one."""
    *_, made = tensors
    if hasattr(module, "facts"):
        title, *lines = module.facts()
    elif made.equation.startswith("LN("):
        title, lines = "Norm", [made.equation.removeprefix("LN(x)")]
    else:
        title, lines = made.name, [made.equation]
    lines.append(f"matrix {letter}, shared" if letter else "")
    title = f"masked {title}" if is_masked else title
    width = f"{made.shape[-1]:,}"
    shape = f"n x {width}" if len(made.shape) > 2 else width
    return Block(title[0].upper() + title[1:], tuple(filter(None, lines)), shape, is_cross="cross" in name)


def _memory(model: Any, memory_len: int) -> list[Block]:
    """Return what the layers of a language model read besides their input."""
    lines = (f"the layer's inputs at {memory_len:,}", "earlier positions, no gradient")
    found = [Block("Memory", lines)] if memory_len else []
    for name, table in model.named_parameters():
        if name.endswith("layers.0.positions"):
            lines = (f"{table.shape[0]:,} distances,", "added to each layer's input")
            found.append(Block("Trained positions", lines))
    return found


def _operations(
    modules: Mapping[str, Any], traced: Mapping[str, Sequence[TracedTensor]], masked: set[str], *, has_memory: bool
) -> tuple[AttentionOperations, ...]:
    """Return the operations of each kind of attention."""
    kinds: dict[str, list[str]] = {}
    for name in traced:
        if hasattr(modules[name], "operations"):
            kinds.setdefault(modules[name].kind, []).append(name)
    found = []
    for kind, places in kinds.items():
        layer, some_masked = modules[places[0]], len(masked & {*places})
        inputs = [_inputs(name, modules[name], traced[name], has_memory) for name in places]
        some = "no padding; in masked layers no later positions"
        hidden = {0: "", len(places): "no later positions"}.get(some_masked, some)
        masking = "; ".join(filter(None, (hidden, dict(layer.operations()).get("Mask")))) or "no padding"
        found.append(
            AttentionOperations(
                kind=kind[0].upper() + kind[1:],
                places=tuple(places),
                num_heads=layer.num_heads,
                d_model=layer.out_proj.out_features,
                inputs=inputs[0],
                steps=tuple((step, masking if step == "Mask" else formula) for step, formula in layer.operations()),
                has_other_sizes=len({tuple(shape for *_, shape in some) for some in inputs}) > 1,
            )
        )
    return tuple(found)


def _inputs(
    name: str, layer: Any, tensors: Sequence[TracedTensor], has_memory: bool
) -> tuple[tuple[str, str, str], ...]:
    """Return letter, source and shape of what a head reads."""
    widths = {line.name[0]: line.shape[-1] for line in tensors if line.name != "distances"}
    found = []
    for letter in layer.inputs:
        rows = "n" if letter in ("Q", "QK") or not layer.sees_whole else "m"
        source = "the encoder's output" if "cross" in name else "memory and x" if has_memory else "x"
        source = {"Q": "x", "QK": "x", "r": "distances R"}.get(letter, source)
        width = widths[letter[0].lower()] if letter != "r" else layer.head_dim
        found.append((letter, source, f"{layer.num_heads} x {rows} x {width}"))
    return tuple(found)


def _masked_layers(model: Any, inputs: dict[str, Any]) -> set[str]:
    """Return the names of attention layers no position of which attended to a later one."""
    with torch.no_grad(), observe(model, "weights") as seen:
        model.log_probs(*inputs.values())
    return {
        name.removeprefix("body.")
        for name, (weights, *_) in seen.items()
        if "cross" not in name and not weights.triu(weights.shape[-1] - weights.shape[-2] + 1).any()
    }


def example_inputs(model: Any) -> dict[str, Tensor]:
    """Return arguments of `log_probs`: few tokens, but more than hashed layers attend to exactly."""
    device = next(model.parameters()).device
    exact = [getattr(getattr(module, "settings", None), "exact_len", 0) for module in model.modules()]
    length = min(8 + max(exact), _MOST_EXAMPLE_TOKENS, model.config.longest_input or _MOST_EXAMPLE_TOKENS)
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    if model.config.task == "translation":
        lengths = torch.tensor([length], device=device)
        return {"source": tokens, "source_lengths": lengths, "target": tokens[:, : max(1, length - 1)]}
    if model.config.task == "spans":
        features = tokens[:, :, None]
        return {"pieces": features, "affixes": features, "lengths": torch.tensor([length], device=device)}
    return {"tokens": tokens}
