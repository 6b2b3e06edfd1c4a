"""Computation of a sequence in chunks, for functions that treat all positions alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from manyheads.nn.shapes import Float


def chunk_slices(length: int, chunk_len: int) -> Iterator[slice]:
    """Yield slices of at most chunk_len positions that cover the length in order; one slice if chunk_len is 0.

    A length of 0 gives one empty slice, so that a function is called at least once.
    """
    step = chunk_len or max(length, 1)
    for first in range(0, max(length, 1), step):
        yield slice(first, min(first + step, length))


def real_chunks(length: int, chunk_len: int, lengths: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield `chunk_slices`, and how many positions of each row are real in each. lengths: (rows,); None: all are."""
    for some in chunk_slices(length, chunk_len):
        yield some, None if lengths is None else (lengths - some.start).clamp(0, some.stop - some.start)


def in_chunks(
    function: Callable[[Tensor], Tensor], x: Float[Tensor, "batch length width"], chunk_len: int
) -> Float[Tensor, "batch length out_width"]:
    """Compute function(x) for chunk_len positions at a time; the function must treat positions alike.

    Paper: Kitaev et al. 2020, sec. 3 ("Chunking"), eq. 10.
    Args:
        function: (batch, some, width) -> (batch, some, out_width).
        x: the whole sequence.
        chunk_len: positions at once; 0: all.

    Cost: without gradients, the function's intermediate tensors exist for chunk_len positions only; with gradients see
        `nn.reversible`, whose backward pass uses the same chunks.
    """
    if not chunk_len or x.shape[1] <= chunk_len:
        return function(x)
    parts = chunk_slices(x.shape[1], chunk_len)
    if torch.is_grad_enabled():
        return torch.cat([function(x[:, part]) for part in parts], dim=1)
    out: Tensor | None = None
    for part in parts:
        piece = function(x[:, part])
        if out is None:
            out = piece.new_empty(x.shape[0], x.shape[1], piece.shape[2])
        out[:, part] = piece
    assert out is not None
    return out


def neighbours(chunk_len: int, before: int, after: int) -> str:
    """Return in words which chunks a query sees."""
    near = [
        f"the {'one' if count == 1 else count} {side}"
        for count, side in ((before, "before"), (after, "after"))
        if count
    ]
    return f"chunks of {chunk_len}: {' and '.join(['its own', *near])}"
