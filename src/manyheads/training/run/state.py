"""All state that affects the next step, and its form in a checkpoint: counters as JSON; weights, moments and the memory
of a recurrent model as tensors.

Random generators and schedules are not included, because both are functions of the seed and the counters. Every rank
has the memory of its own lanes. In checkpoints it is gathered, because it is small compared with weights and moments.
So a checkpoint does not depend on the number of ranks that write or read it.

One model on the ranks of a group: the rows of each rank, and the whole weights for other uses than training steps.

With DDP every rank has the whole model. With FSDP2 every rank also keeps a second, whole model beside its shards for
validation, samples, the search for a fault, and the model folder. It needs the memory of the weights on every rank;
gradients and moments, which need three times as much, are only sharded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyheads.data.batch import share
from manyheads.distributed.group import Group
from manyheads.distributed.wrap import is_part, part_of, whole
from manyheads.errors import CheckpointError
from manyheads.models.pretrained import load_portable_state, portable_name, portable_state
from manyheads.training.optim.optimiser import MovingAverage, load_optimiser_tensors, optimiser_tensors

if TYPE_CHECKING:
    from manyheads.checkpoint.format import Allocate
    from manyheads.training.run.objective import Batch


class Memory:
    """The states after the last step, by micro-batch; empty for models without memory."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}
        self._rows: dict[int, int] = {}  # number of lanes of each micro-batch, over all ranks

    def of(self, micro: int, rows: int | None = None) -> Any:
        """Return the state from which micro-batch `micro` continues; None at the beginning.

        Args: rows: of the micro-batch over all ranks. A state of other lanes is not continued: in a run with
            `data.length_schedule` the number of lanes changes with the length. None: not compared.
        """
        known = self._rows.get(micro)
        return None if None not in (rows, known) and rows != known else self._states.get(micro)

    def keep(self, states: Mapping[int, Any], rows: Mapping[int, int] | None = None) -> None:
        """Replace all states.

        Args: rows: lanes of each micro-batch over all ranks, of which the states contain this rank's.
        """
        self._states = {micro: state for micro, state in states.items() if state is not None}
        self._rows = dict(rows or {})

    def forget(self) -> None:
        """Delete the states, at a new epoch or after a step whose states are invalid."""
        self._states, self._rows = {}, {}

    def tensors(self, group: Group | None = None) -> dict[str, Tensor]:
        """Return a checkpoint's tensors, `micro.leaf` -> tensor of all lanes. In a group, a collective operation."""
        if group is not None and not group.is_alone:
            return self._gathered(group)
        return {
            f"{micro}.{number}": leaf.contiguous()
            for micro, state in self._states.items()
            for number, leaf in enumerate(pytree.tree_leaves(state))
        }

    def _gathered(self, group: Group) -> dict[str, Tensor]:
        """Return all ranks' lanes, concatenated. Tensors without a lane axis are equal on all ranks; the first rank's
        is used.
        """
        found = {}
        for micro, rows in sorted(self._rows.items()):
            leaves = pytree.tree_leaves(self._states[micro]) if micro in self._states else None
            told = group.exchange(None if leaves is None else [leaf.dim() for leaf in leaves])
            axes: list[int] = next((one for one in told if one is not None), [])
            for number, count in enumerate(axes):
                leaf = None if leaves is None else leaves[number].contiguous()
                if count:
                    found[f"{micro}.{number}"] = group.joined(leaf, rows=rows)
                else:
                    first = leaf[None] if leaf is not None and group.is_main else None
                    found[f"{micro}.{number}"] = group.joined(first, rows=1)[0]
        return found

    def load(self, tensors: Mapping[str, Tensor], template: Any, group: Group | None = None) -> None:
        """Load the tensors of a checkpoint.

        Args:
            template: a state of the same structure; None for a model without memory.
            group: the group whose ranks take contiguous parts of the lanes.

        Raises: CheckpointError: the tensors do not match that structure.
        """
        by_micro: dict[int, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            micro, _, number = name.partition(".")
            if not (micro.isdecimal() and number.isdecimal()):
                raise CheckpointError(f"The checkpoint's memory contains {name!r}, which is not part of a memory.")
            by_micro.setdefault(int(micro), {})[int(number)] = tensor
        like, structure = pytree.tree_flatten(template)
        like = [] if template is None else like
        self.forget()
        for index, leaves in by_micro.items():
            if sorted(leaves) != list(range(len(like))):
                raise CheckpointError(
                    f"The checkpoint's memory has {len(leaves)} parts for micro-batch {index}, the model {len(like)}."
                )
            self._rows[index] = rows = max((leaf.shape[0] for leaf in leaves.values() if leaf.dim()), default=0)
            mine = slice(0, rows) if group is None else share(rows, group.rank, group.world)
            if mine.start < mine.stop:
                own = {number: leaf[mine].clone() if leaf.dim() else leaf for number, leaf in leaves.items()}
                moved = [own[number].to(old.device) for number, old in enumerate(like)]
                self._states[index] = pytree.tree_unflatten(moved, structure)


MEMORY = "memory"
"""The file with the memory of a recurrent model; it holds the memory of all ranks."""


@dataclass
class Counters:
    """The progress of a run. JSON stores the floats exactly.

    Attributes:
        step: number of optimiser steps, skipped ones included.
        epoch: epoch of the next step.
        row: row of the next step in the epoch's plan.
        tokens: number of target tokens so far.
        elapsed_seconds: time in the loop, over all resumed parts.
        window_loss, window_nll, window_tokens, window_norm, window_steps: sums since the last line of metrics.
        skipped: number of consecutive skipped steps.
        best_score: score of the best validation; lower is better (BLEU and F1 are negated). None before the first.
        best_step: its step.
        num_worse: number of validations since then.
        validated_step: step of the last validation.
        validated_seconds: elapsed_seconds at its end, with `validation.every_minutes`; otherwise 0.
        metrics_bytes: length of metrics.jsonl at the time of the save.
    """

    step: int = 0
    epoch: int = 0
    row: int = 0
    tokens: int = 0
    elapsed_seconds: float = 0.0
    window_loss: float = 0.0
    window_nll: float = 0.0
    window_tokens: int = 0
    window_norm: float = 0.0
    window_steps: int = 0
    skipped: int = 0
    best_score: float | None = None
    best_step: int | None = None
    num_worse: int = 0
    validated_step: int = 0
    validated_seconds: float = 0.0
    metrics_bytes: int = 0

    @classmethod
    def from_json(cls, record: Any) -> Counters:
        """Raises: CheckpointError: a counter is missing, unknown, or not a number."""
        names = {item.name for item in fields(cls)}
        if isinstance(record, dict):
            record = {"validated_seconds": 0.0, **record}  # older versions have none
        if not isinstance(record, dict) or record.keys() != names:
            odd = sorted(names ^ set(record)) if isinstance(record, dict) else ["all"]
            raise CheckpointError(
                f"The checkpoint's counters do not match this version of manyheads: {', '.join(odd)}."
            )
        for name, value in record.items():
            if not _fits(name, value):
                raise CheckpointError(f"The checkpoint's counter {name} is {_shown(value)}, which is impossible.")
        return cls(**record)


def _fits(name: str, value: Any) -> bool:
    """Return whether a counter can have this value: sums and scores are finite, all others are counts."""
    if value is None:
        return name in ("best_score", "best_step")
    if name in ("elapsed_seconds", "validated_seconds", "window_loss", "window_nll", "window_norm", "best_score"):
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is int and 0 <= value < 2**53


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every trained tensor once, by its name in files."""
    return {portable_name(name): parameter for name, parameter in model.named_parameters()}


def gather(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    average: MovingAverage | None,
    memory: Memory,
    group: Group | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint by file: model, optimiser, and ema and memory if they exist. Not copied.

    Args: model: has the trained parameters; if they are sharded, so are the tensors, except for memory.
    """
    tensors: dict[str, dict[str, Tensor]] = {
        "model": portable_state(model),
        "optimiser": optimiser_tensors(optimiser, named_parameters(model)),
    }
    if average is not None:
        tensors["ema"] = average.tensors
    remembered = memory.tensors(group)
    if remembered:
        tensors[MEMORY] = remembered
    return tensors


def allocator_for(model: nn.Module) -> Allocate:
    """Return the layout of a sharded checkpoint's tensors: sharded like the model's, if the model is sharded."""
    named = {**portable_state(model), **{name: one.detach() for name, one in named_parameters(model).items()}}

    def allocate(stem: str, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        like = named.get(name.partition(".")[2] if stem == "optimiser" else name)
        if like is None or not is_part(like) or like.shape != shape:
            return None
        return torch.empty_like(like, dtype=dtype)

    return allocate


@torch.no_grad()
def restore(
    tensors: Mapping[str, Mapping[str, Tensor]],
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    average: MovingAverage | None,
    memory: Memory,
    first_state: Any = None,
    group: Group | None = None,
) -> None:
    """Load the tensors of a checkpoint. first_state: see `Objective.first_state`.

    Raises: CheckpointError, ModelFileError: a file is missing, or names or shapes do not match the model.
    """
    missing = sorted({"model", "optimiser", *(["ema"] if average else [])} - tensors.keys())
    if missing:
        raise CheckpointError(f"The checkpoint has no {missing[0]}.safetensors.")
    load_portable_state(model, _spread_like(portable_state(model), tensors["model"]), where="the checkpoint's weights")
    named = named_parameters(model)
    load_optimiser_tensors(optimiser, named, tensors["optimiser"])
    if average is not None:
        average.load(_spread_like(average.tensors, tensors["ema"]))
    memory.load(tensors.get(MEMORY, {}), first_state, group)


def _spread_like(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shard the whole tensors of a file like those of the same name and shape."""
    fits = {name for name, tensor in tensors.items() if name in own and own[name].shape == tensor.shape}
    return {name: part_of(tensor, own[name]) if name in fits else tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class RankBatch:
    """This rank's rows of a micro-batch.

    Attributes:
        batch: the rows, padded as in the whole micro-batch.
        first: index of its first row in the micro-batch.
        total: number of rows of the micro-batch.
        counts: False for a placeholder: with fewer rows than ranks, the remaining ranks compute the first row with
            weight zero, because every rank has to take part in every collective operation.
    """

    batch: Any
    first: int
    total: int
    counts: bool = True


def rank_batch(batch: Batch, group: Group) -> RankBatch:
    """Return a contiguous part of a micro-batch with at least one row."""
    total = len(batch.sample_ids)
    if group.is_alone:
        return RankBatch(batch, 0, total)
    rows = share(total, group.rank, group.world)
    if rows.start == rows.stop:
        return RankBatch(batch.rows(slice(0, 1)), 0, total, counts=False)
    return RankBatch(batch.rows(rows), rows.start, total)


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that can be separate FSDP2 units: the layers of every stack, if a layer is called as a module.

    A Reformer's layers cannot: the backward pass computes reversible sublayers again with the parameters of the forward
    pass, which must not be freed in between. All its parameters are one unit.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    called = nn.Module.forward
    return [block for stack in stacks for block in stack if type(block).forward is not called]


@dataclass(frozen=True)
class ParallelModel:
    """A model on a group.

    Attributes:
        model: the whole model, on every rank.
        trained: has the trained parameters: the model itself, or its sharded copy.
        called: the module to call in training.
        group: the ranks.
    """

    model: Any
    trained: nn.Module
    called: nn.Module
    group: Group = field(default_factory=Group)

    @classmethod
    def alone(cls, model: nn.Module) -> ParallelModel:
        """Return a model on one rank."""
        return cls(model, model, model)

    @classmethod
    def over(cls, model: nn.Module, kind: str, group: Group) -> ParallelModel:
        """Return a model on a group whose ranks all built the same model. kind: `ddp` or `fsdp`."""
        if group.is_alone:
            return cls.alone(model)
        from manyheads.distributed.wrap import parallelise, shardable

        if kind == "ddp":
            return cls(model, model, parallelise(model, "ddp", group, ()), group)
        parts = copy.deepcopy(model)
        called = parallelise(parts, "fsdp", group, shardable(parts, units(parts)))
        return cls(model, parts, called, group)

    @property
    def is_sharded(self) -> bool:
        """True if the trained weights are sharded."""
        return self.trained is not self.model

    @torch.no_grad()
    def gather(self, values: Mapping[str, Tensor] | None = None, *, gradients: bool = False) -> Any:
        """Return the whole model with the current weights. A collective operation if sharded.

        Args:
            values: other tensors with the same names, such as averages; None: the trained weights.
            gradients: include the gradients.
        """
        if not self.is_sharded:
            return self.model
        now = portable_state(self.trained)
        load_portable_state(self.model, {name: whole((values or now).get(name, now[name])) for name in now})
        if gradients:
            for mine, part in zip(self.model.parameters(), self.trained.parameters(), strict=True):
                mine.grad = None if part.grad is None else whole(part.grad)
        return self.model
