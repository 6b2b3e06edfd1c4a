"""One model on the ranks of a group: the rows of each rank, and the whole weights for other uses than training steps.

With DDP every rank has the whole model. With FSDP2 every rank also keeps a second, whole model beside its shards for
validation, samples, the search for a fault, and the model folder. It needs the memory of the weights on every rank;
gradients and moments, which need three times as much, are only sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.data.batch import share
from manyheads.distributed.group import Group
from manyheads.distributed.wrap import whole
from manyheads.models.pretrained import load_portable_state, portable_state

if TYPE_CHECKING:
    from manyheads.training.run.objective import Batch


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
