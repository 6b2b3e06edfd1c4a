"""The best of a vocabulary: the functions of torch, and a search by blocks that is faster than `topk` on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.nn.kernels import policy

_BLOCK = 64


def top_k(values: Tensor, count: int, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `values.topk(count)` over the last axis of (rows, size); NaN counts as the largest; ties may differ.

    Args: added: (groups, rows per group), a number that is added to all values of its row. The result is then the top-k
        of each group, and indices count through the rows of the group.
    """
    rows, size = values.shape
    groups = rows if added is None else added.shape[0]
    if (size // _BLOCK) * (rows // max(groups, 1)) < 4 * count or not policy.searches_blocks(values.device):
        pool = values if added is None else (values.view(*added.shape, size) + added[:, :, None]).flatten(1)
        largest, indices = pool.topk(count)
        return largest, indices
    return _top_k_by_blocks(values.view(groups, -1, size), count, added)


def highest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row and its index, both (rows, 1): the first of equal ones; NaN is largest."""
    largest, places = values.max(-1, keepdim=True)
    return largest, places


def _top_k_by_blocks(values: Tensor, count: int, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """Search only the `count` blocks with the largest maxima, which contain the result.

    One vectorised pass computes the maxima. On CPUs it takes half the time of topk for 8,000 ids and less than a third
    for 32,000. values: (groups, rows per group, size); added: see `top_k`.
    """
    groups, each, size = values.shape
    blocks = size // _BLOCK
    cut = blocks * _BLOCK
    maxima = values[:, :, :cut].view(groups, each, blocks, _BLOCK).amax(-1)
    if added is not None:
        maxima += added[:, :, None]
    winners = maxima.flatten(1).topk(count, sorted=False).indices
    first = winners * _BLOCK + torch.div(winners, blocks, rounding_mode="floor") * (size - cut)
    place = values.device
    candidates = (first[:, :, None] + torch.arange(_BLOCK, device=place)).flatten(1)
    if cut < size:
        rows, rest = torch.arange(each, device=place)[:, None], torch.arange(cut, size, device=place)
        ends = (rows * size + rest).flatten()
        candidates = torch.cat([candidates, ends.expand(groups, -1)], 1)
    found = values.flatten(1).gather(1, candidates)
    if added is not None:
        found += added.gather(1, torch.div(candidates, size, rounding_mode="floor"))
    largest, at = found.topk(count)
    return largest, candidates.gather(1, at)
