"""Access to sharded tensors as whole tensors; plain tensors are returned unchanged.

A plain tensor has no `full_tensor`, so torch.distributed is not imported for it.

A model on several ranks: replicated (DDP) or with sharded parameters (FSDP2).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from manyheads.distributed.group import Group


def is_part(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank stores a shard."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank. For a sharded tensor this is a collective operation."""
    return cast(Tensor, cast(Any, tensor).full_tensor()) if is_part(tensor) else tensor


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """Return `full` sharded like `like`. Every rank already has all of it, so nothing is sent."""
    if not is_part(like) or is_part(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    spread = cast(Any, like)
    full = full.to(device=spread.device, dtype=spread.dtype)
    return distribute_tensor(full, spread.device_mesh, spread.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return cast(Tensor, cast(Any, tensor).to_local()) if is_part(tensor) else tensor


Parallel = Literal["ddp", "fsdp"]

_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"  # before torch 2.13


def parallelise(model: nn.Module, kind: Parallel, group: Group, blocks: Sequence[nn.Module]) -> nn.Module:
    """Return the module to call instead of `model` in training; its forward is the model's.

    Gradients are the mean over ranks of each rank's gradients.

    Args:
        model: with the same weights on every rank; with `fsdp` its parameters are sharded in place.
        kind: `ddp` or `fsdp`.
        group: with a group of one, the model is returned unchanged.
        blocks: with `fsdp`, modules whose parameters are gathered and freed together (see `shardable`); all other
            parameters form one more unit.
    """
    if group.is_alone:
        return model
    if kind == "ddp":
        options: dict[str, Any] = {_SYNC_BUFFERS: False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(model, **options)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(group.device.type, (group.world,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shardable(model: nn.Module, candidates: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the candidates that share no parameter with the rest of the model, so that each can be an FSDP2 unit."""
    users, inside = _uses(model), {block: _uses(block) for block in candidates}
    return [
        block
        for block, uses in inside.items()
        if uses and all(users[parameter] == count for parameter, count in uses.items())
    ]


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    """Return by how many modules each parameter is used; a module that occurs twice counts twice."""
    modules = (module for _, module in model.named_modules(remove_duplicate=False))
    return Counter(parameter for module in modules for parameter in module.parameters(recurse=False))


def accumulating(module: nn.Module) -> AbstractContextManager[Any]:
    """Within the block, do not reduce the gradients of replicated models; they are reduced with the next ones.

    Sharded models reduce theirs every time, because whole gradients would need the memory that sharding saves.
    """
    if isinstance(module, DistributedDataParallel):
        no_sync: AbstractContextManager[Any] = module.no_sync()
        return no_sync
    return nullcontext()
