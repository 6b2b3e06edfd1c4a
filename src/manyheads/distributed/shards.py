"""Access to sharded tensors as whole tensors; plain tensors are returned unchanged.

A plain tensor has no `full_tensor`, so torch.distributed is not imported for it.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor


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
