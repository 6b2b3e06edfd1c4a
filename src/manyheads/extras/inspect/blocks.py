"""The blocks of a model, as figure 1 of a paper draws them, found by running the model once.

The order of the blocks is the order in which they ran. Their sizes are read from their outputs and parameters.
Attention is called masked if no position attended to a later one. Nothing is taken from a fixed picture.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyheads.architectures.reformer.layers import AttentionSublayer, FeedForwardSublayer
from manyheads.architectures.reformer.translator import CrossSublayer, SelfSublayer
from manyheads.extras.inspect.block_facts import Facts, block_facts, matrices_of
from manyheads.extras.inspect.equations import ATTENTION
from manyheads.extras.inspect.operations import AttentionOperations, operations_of
from manyheads.extras.inspect.tracing import LAYER, TracedTensor, trace
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.observing import observe
from manyheads.nn.attention.relative import DistanceEncoding, RelativeAttention
from manyheads.nn.layers import Residual

__all__ = ["Block", "LayerKind", "ModelBlocks", "Stack", "Wiring", "blocks_of"]

Wiring = Literal["post", "pre", "reversible"]
"""Of a sublayer f: LN(x + f(x)); x + f(LN(x)); or one of two streams gets f(LN(the other))."""

_REVERSIBLE = AttentionSublayer | SelfSublayer | CrossSublayer | FeedForwardSublayer
_MOST_EXAMPLE_TOKENS = 2048


@dataclass(frozen=True)
class Block:
    """A box. kind: `embedding positions attention feed-forward norm pooling head memory none`. lines: what is known of
    it. wiring: of a sublayer in a layer. is_cross: it also reads the encoder's output. shape: of its output, without
    the batch; n is the number of tokens.
    """

    kind: str
    name: str
    lines: tuple[str, ...] = ()
    wiring: Wiring | None = None
    is_cross: bool = False
    shape: str = ""


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
class ModelBlocks:
    """A model. title: its sizes in words. output: what follows the last stack. result: what the output is. operations:
    of each kind of attention.
    """

    architecture: str
    title: str
    stacks: tuple[Stack, ...]
    output: tuple[Block, ...]
    result: str
    operations: tuple[AttentionOperations, ...] = field(default=())


@dataclass
class _Column:
    """A stack while it is found. layers: number from 0 -> wiring, facts and whether it is cross, of each sublayer."""

    before: list[Block] = field(default_factory=list)
    layers: dict[int, list[tuple[Wiring, bool, Facts]]] = field(default_factory=dict)
    after: list[Block] = field(default_factory=list)
    sides: list[Block] = field(default_factory=list)
    pending: Facts | None = None

    def add(self, block: Block) -> None:
        (self.after if self.layers else self.before).append(block)


_RESULTS = {"classification": "probabilities of the labels", "spans": "probabilities of the labels of each span"}


def blocks_of(model: Any) -> ModelBlocks:
    """Run a composite on a few tokens and return its blocks.

    Args: model: a composite, in evaluation mode, on any device.

    Raises: as the model's forward.
    """
    inputs = _example(model)
    lines = trace(model, inputs)
    masked = _masked_layers(model, inputs)
    by_module: dict[str, list[TracedTensor]] = {}
    for line in lines:
        by_module.setdefault(line.module, []).append(line)
    two = "target_embedding" in by_module
    columns: dict[str, _Column] = {name: _Column() for name in (("encoder", "decoder") if two else ("",))}
    matrices = matrices_of(model)
    output: list[Block] = []
    for name, tensors in by_module.items():
        module = _module(model, name)
        if name == "" or module is None:
            continue
        side = "" if not two else "encoder" if name.startswith(("source", "encoder")) else "decoder"
        if name in ("head", "pooling"):
            output.append(_block(block_facts(model, name, module, tensors, matrices)))
            continue
        _place(columns[side], model, name, module, tensors, masked, matrices)
    stacks = tuple(_stack(name, column, model) for name, column in columns.items())
    config = model.config
    return ModelBlocks(
        architecture=config.architecture,
        title=config.describe(),
        stacks=stacks,
        output=tuple(output),
        result=_RESULTS.get(config.task, "probabilities of the next token"),
        operations=_operations(model, by_module, masked),
    )


def _place(
    column: _Column,
    model: Any,
    name: str,
    module: nn.Module,
    tensors: list[TracedTensor],
    masked: set[str],
    matrices: dict[int, str],
) -> None:
    """Add the output of a module to its column."""
    found = LAYER.match(name)
    if isinstance(module, DistanceEncoding) and _is_relative(model):
        column.sides.append(_block(block_facts(model, name, module, tensors, matrices)))
    elif found is None:
        column.add(_block(block_facts(model, name, module, tensors, matrices)))
    elif isinstance(module, Residual | _REVERSIBLE):
        wiring: Wiring = module.position if isinstance(module, Residual) else "reversible"
        facts = column.pending
        assert facts is not None  # of the sublayer, which comes before its residual
        column.layers.setdefault(int(found[2]), []).append((wiring, "cross" in facts.place, facts))
        column.pending = None
    else:
        column.pending = block_facts(model, name, module, tensors, matrices, is_masked=name in masked)


def _stack(name: str, column: _Column, model: Any) -> Stack:
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, sublayers in column.layers.items():
        key = tuple((wiring, is_cross, facts.name, facts.template) for wiring, is_cross, facts in sublayers)
        alike.setdefault(key, []).append(index)
    kinds = []
    for indices in alike.values():
        rows = [column.layers[index] for index in indices]
        blocks = [
            replace(_block(Facts.merged([facts for _, _, facts in same])), wiring=same[0][0], is_cross=same[0][1])
            for same in zip(*rows, strict=True)
        ]
        kinds.append(LayerKind(tuple(index + 1 for index in indices), tuple(blocks)))
    reads = {"encoder": "source tokens", "decoder": "target tokens, shifted right"}.get(name, "tokens")
    return Stack(
        name,
        reads,
        tuple(column.before),
        tuple(kinds),
        tuple(column.after),
        (*_memory(model), *column.sides) if name != "encoder" else (),
    )


def _memory(model: Any) -> list[Block]:
    """Return what the layers of a language model read besides their input."""
    found = []
    if memory_len := getattr(model.config, "context_settings", {}).get("memory_len", 0):
        lines = (f"the layer's inputs at {memory_len:,}", "earlier positions, no gradient")
        found.append(Block("memory", "Memory", lines))
    tables = [one for name, one in model.named_parameters() if name.endswith("layers.0.positions")]
    if tables:
        found.append(
            Block(
                "positions", "Trained positions", (f"{tables[0].shape[0]:,} distances,", "added to each layer's input")
            )
        )
    return found


def _block(facts: Facts) -> Block:
    return Block(facts.kind, facts.name, facts.lines, shape=facts.shape)


def _operations(
    model: Any, by_module: dict[str, list[TracedTensor]], masked: set[str]
) -> tuple[AttentionOperations, ...]:
    """Return the operations of the first layer of each kind of attention."""
    found: dict[str, AttentionOperations] = {}
    has_memory = bool(getattr(model.config, "context_settings", {}).get("memory_len", 0))
    for name, tensors in by_module.items():
        module = _module(model, name)
        if isinstance(module, ATTENTION):
            one = operations_of(name, module, tensors, is_masked=name in masked, has_memory=has_memory)
            if one.kind in found:
                found[one.kind] = found[one.kind].with_place(one)
            else:
                found[one.kind] = one
    return tuple(found.values())


def _is_relative(model: nn.Module) -> bool:
    return any(isinstance(module, RelativeAttention) for module in model.modules())


def _module(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module of a traced name, which leaves the composite's `body.` out."""
    modules = dict(model.named_modules())
    return modules.get(f"body.{name}", modules.get(name))


def _masked_layers(model: Any, inputs: dict[str, Any]) -> set[str]:
    """Return the names of attention layers no position of which attended to a later one."""
    with torch.no_grad(), observe(model, "weights") as seen:
        model.log_probs(*inputs.values())
    return {
        name.removeprefix("body.")
        for name, (weights, *_) in seen.items()
        if "cross" not in name and not weights.triu(weights.shape[-1] - weights.shape[-2] + 1).any()
    }


def _example(model: Any) -> dict[str, Tensor]:
    """Return arguments of `log_probs`: few tokens, but more than hashed layers attend to exactly."""
    device = next(model.parameters()).device
    exact = [module.settings.exact_len for module in model.modules() if isinstance(module, LSHSelfAttention)]
    length = min([8 + max(exact, default=0), _MOST_EXAMPLE_TOKENS, model.config.longest_input or _MOST_EXAMPLE_TOKENS])
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    if model.config.task == "translation":
        lengths = torch.tensor([length], device=device)
        return {"source": tokens, "source_lengths": lengths, "target": tokens[:, : max(1, length - 1)]}
    if model.config.task == "spans":
        return {
            "pieces": tokens[:, :, None],
            "affixes": tokens[:, :, None],
            "lengths": torch.tensor([length], device=device),
        }
    return {"tokens": tokens}
