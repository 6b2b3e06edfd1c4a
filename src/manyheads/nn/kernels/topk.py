"""Top-k and argmax over a vocabulary: torch's, and by blocks, which is faster on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.nn.kernels import policy

__all__ = ["likeliest", "top_k"]

_BLOCK = 64
_WORTH_BLOCKS = 1 << 15


def top_k(values: Tensor, count: int, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `values.topk(count)` over the last axis of (rows, size); NaN counts as the largest; ties may differ.

    Args: added: (groups, rows per group), a number for each row. Then the result covers all values of a group, with the
        row's number added to its values, and indices continue from one row of the group to the next.
    Cost: on a CPU, one vectorised pass computes the maximum of each block, and only the `count` blocks with the largest
        maxima, which contain the result, are searched. Twice as fast as topk at 8,000 ids, over three times at 32,000.
    """
    rows, size = values.shape
    groups = rows if added is None else added.shape[0]
    each = rows // groups
    blocks = size // _BLOCK
    if blocks * each < 4 * count or not policy.searches_blocks(values.device):
        pool = values if added is None else (values.view(groups, each, size) + added[:, :, None]).flatten(1)
        largest, places = pool.topk(count)
        return largest, places
    cut = blocks * _BLOCK
    maxima = values[:, :cut].view(groups, each, blocks, _BLOCK).amax(-1)
    if added is not None:
        maxima += added[:, :, None]
    winners = maxima.flatten(1).topk(count, sorted=False).indices
    first = winners * _BLOCK + torch.div(winners, blocks, rounding_mode="floor") * (size - cut)
    places = (first[:, :, None] + torch.arange(_BLOCK)).flatten(1)
    if cut < size:
        ends = (torch.arange(each)[:, None] * size + torch.arange(cut, size)).flatten()
        places = torch.cat([places, ends.expand(groups, -1)], 1)
    found = values.view(groups, each * size).gather(1, places)
    if added is not None:
        found += added.gather(1, torch.div(places, size, rounding_mode="floor"))
    largest, at = found.topk(count)
    return largest, places.gather(1, at)


def likeliest(values: Tensor) -> Tensor:
    """Compute `values.argmax(-1)` of (rows, size): the first of equal values, NaN counts as the largest. Returns
    (rows,).

    Cost: on a CPU, one vectorised pass; argmax compares one number at a time. Four times as fast at 8,000 ids.
    """
    rows, size = values.shape
    blocks = size // _BLOCK
    if values.numel() < _WORTH_BLOCKS or not blocks or not policy.searches_blocks(values.device):
        return values.argmax(-1)
    cut = blocks * _BLOCK
    by_block = values[:, :cut].view(rows, blocks, _BLOCK)
    winners = by_block.amax(-1).argmax(-1)
    within = by_block.gather(1, winners[:, None, None].expand(-1, 1, _BLOCK))[:, 0].argmax(-1)
    best = winners * _BLOCK + within
    if cut == size:
        return best
    both = torch.stack([best, cut + values[:, cut:].argmax(-1)], 1)
    return both.gather(1, values.gather(1, both).argmax(-1, keepdim=True))[:, 0]
