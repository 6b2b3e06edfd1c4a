"""Tensors that are spread over ranks, seen as whole ones; plain tensors pass through unchanged.

A plain tensor has no `full_tensor`, so nothing of torch.distributed is imported for it.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

__all__ = ["is_part", "local", "part_of", "whole"]


def is_part(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which a rank holds a part."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. A collective operation, where it is spread."""
    return cast(Tensor, cast(Any, tensor).full_tensor()) if is_part(tensor) else tensor


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """`full`, spread as `like` is; every rank has all of it before, so nothing travels."""
    if not is_part(like) or is_part(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    spread = cast(Any, like)
    full = full.to(device=spread.device, dtype=spread.dtype)
    return distribute_tensor(full, spread.device_mesh, spread.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, or all of it where it is not spread."""
    return cast(Tensor, cast(Any, tensor).to_local()) if is_part(tensor) else tensor
