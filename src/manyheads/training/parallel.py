"""One model over the ranks of a group: which rows each takes, and where its weights are whole.

With copies (DDP) every rank has the whole model. With parts (FSDP2) a second, whole one stands beside the parts, for
all that is no training step: validation, samples, the search for a fault, the model folder. It takes the memory of the
weights on every rank; gradients and moments, which take three times as much, are in parts alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.architectures.pretrained import load_portable_state, portable_state
from manyheads.data.shares import share
from manyheads.distributed.group import Group
from manyheads.distributed.shards import whole
from manyheads.training.objective import Batch

__all__ = ["Portion", "Spread", "portion", "units"]


@dataclass(frozen=True)
class Portion:
    """This rank's rows of a micro-batch.

    Attributes:
        batch: the rows, padded as in the whole.
        first: number of the first of them in the whole.
        total: rows of the whole.
        counts: False of a stand-in: where there are fewer rows than ranks, the others compute the first row and count
            it as nothing, since every rank has to take part in every collective operation.
    """

    batch: Any
    first: int
    total: int
    counts: bool = True


def portion(batch: Batch, group: Group) -> Portion:
    """A contiguous part of a micro-batch with at least one row."""
    total = len(batch.sample_ids)
    if group.is_alone:
        return Portion(batch, 0, total)
    rows = share(total, group.rank, group.world)
    if rows.start == rows.stop:
        return Portion(batch.rows(slice(0, 1)), 0, total, counts=False)
    return Portion(batch.rows(rows), rows.start, total)


def units(model: nn.Module) -> list[nn.Module]:
    """Blocks that may be sharded by themselves: the layers of every stack, where a layer is called as a module.

    A Reformer's layers are not: reversible sublayers are computed again in the backward pass, with the parameters that
    they were given in the forward pass, which must not have been let go meanwhile. Its parameters are one unit.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    called = nn.Module.forward
    return [block for stack in stacks for block in stack if type(block).forward is not called]


@dataclass(frozen=True)
class Spread:
    """A model over a group.

    Attributes:
        model: whole, on every rank.
        holder: has the parameters that are trained: the model itself, or its parts.
        called: what is called in training.
        group: the ranks.
    """

    model: Any
    holder: nn.Module
    called: nn.Module
    group: Group = field(default_factory=Group)

    @classmethod
    def alone(cls, model: nn.Module) -> Spread:
        """On one rank."""
        return cls(model, model, model)

    @classmethod
    def over(cls, model: nn.Module, kind: str, group: Group) -> Spread:
        """On a group, whose ranks all built the same model. kind: `ddp` or `fsdp`."""
        if group.is_alone:
            return cls.alone(model)
        from manyheads.distributed.wrap import parallelise, shardable

        if kind == "ddp":
            return cls(model, model, parallelise(model, "ddp", group, ()), group)
        parts = copy.deepcopy(model)
        called = parallelise(parts, "fsdp", group, shardable(parts, units(parts)))
        return cls(model, parts, called, group)

    @property
    def in_parts(self) -> bool:
        """Whether no rank holds the trained weights as a whole."""
        return self.holder is not self.model

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor] | None = None, *, gradients: bool = False) -> Any:
        """The whole model, with the weights as they are now. A collective operation, with parts.

        Args:
            values: others under the same names, as averages; None takes what is trained.
            gradients: take these along.
        """
        if not self.in_parts:
            return self.model
        now = portable_state(self.holder)
        load_portable_state(self.model, {name: whole((values or now).get(name, now[name])) for name in now})
        if gradients:
            for mine, part in zip(self.model.parameters(), self.holder.parameters(), strict=True):
                mine.grad = None if part.grad is None else whole(part.grad)
        return self.model
