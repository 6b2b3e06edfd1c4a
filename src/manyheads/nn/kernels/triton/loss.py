"""The loss of rows of logits, and its derivative in their place, in two passes over each row (decision 071).

Milakov and Gimelshein 2018, arXiv:1805.02867: maximum and sum of a softmax are found in one pass. The formula is
`kernels.loss.plain_loss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from manyheads.nn.smoothing import Spread

COLUMNS, WARPS = 4096, 8
"""Logits that a program reads at once, and its groups of 32 threads. Its shared memory is a few hundred bytes."""


@triton.jit
def loss_kernel(
    logits,
    targets,
    keep,
    numbers,
    vocab_size,
    on_target,
    share,
    count,
    excluded,
    HAS_KEEP: tl.constexpr,
    SMOOTHS: tl.constexpr,
    NEEDS_ERROR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the log-probabilities of the target and of all `count` tokens, summed; replace the row by its error.

    Args: excluded: the token without a share of the smoothing; -1: none. count: of tokens with a share.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    columns = tl.arange(0, BLOCK)
    is_kept = True
    if HAS_KEEP:
        is_kept = tl.load(keep + row) != 0
    if is_kept:
        target = tl.load(targets + row)
        # Read before the reductions, which wait for all threads: below, one thread's errors replace what others read.
        # A target outside of the vocabulary gives NaN.
        of_target = tl.load(logits + target, mask=(target >= 0) & (target < vocab_size), other=float("nan"))
        highest = -float("inf")
        total = 0.0
        summed = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            at = start + columns
            z = tl.load(logits + at, mask=at < vocab_size, other=-float("inf")).to(tl.float32)
            above = tl.maximum(highest, tl.max(z, 0))
            finite = tl.where(above == -float("inf"), 0.0, above)  # -inf - -inf would be NaN
            total = total * tl.exp(highest - finite) + tl.sum(tl.exp(z - finite), 0)
            highest = above
            if SMOOTHS:
                summed += tl.where((at < vocab_size) & (at != excluded), z, 0.0)
        total = tl.log(total)  # not added to `highest`, beside which it would lose its last digits
        tl.store(numbers + 2 * row, of_target.to(tl.float32) - highest - total)
        tl.store(numbers + 2 * row + 1, tl.sum(summed, 0) - count * highest - count * total if SMOOTHS else 0.0)
        if NEEDS_ERROR:
            for start in range(0, vocab_size, BLOCK):
                at = start + columns
                z = tl.load(logits + at, mask=at < vocab_size, other=0.0).to(tl.float32)
                error = tl.exp(z - highest - total) - tl.where(at == target, on_target, 0.0)
                if SMOOTHS:
                    error -= tl.where(at == excluded, 0.0, share)
                tl.store(logits + at, error.to(logits.dtype.element_ty), mask=at < vocab_size)
    else:
        tl.store(numbers + 2 * row, 0.0)
        tl.store(numbers + 2 * row + 1, 0.0)
        if NEEDS_ERROR:
            for start in range(0, vocab_size, BLOCK):
                at = start + columns
                tl.store(logits + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < vocab_size)


def loss_of_rows(
    logits: Tensor, targets: Tensor, keep: Tensor | None, parts: Spread, excluded: int | None, needs_error: bool
) -> Tensor:
    """Return two sums over rows, (2,) in float32: the log-probabilities of the targets, and those of all tokens that
    share the smoothing. Replace the logits by the loss's derivative in them if `needs_error`.

    Shape: logits (rows, vocab_size), contiguous; targets (rows,); keep (rows,), False for rows that have no loss and
        are not read. Args: parts: of the smoothing; excluded: the token without a share; None: every token has one.
    """
    rows, vocab_size = logits.shape
    numbers = logits.new_empty(rows, 2, dtype=torch.float32)
    if rows:
        with torch.cuda.device_of(logits):
            loss_kernel[(rows,)](
                logits,
                targets.contiguous(),
                targets if keep is None else keep.contiguous().view(torch.uint8),
                numbers,
                vocab_size,
                parts.on_target,
                parts.share,
                float(parts.count),
                -1 if excluded is None else excluded,
                HAS_KEEP=keep is not None,
                SMOOTHS=parts.share > 0,
                NEEDS_ERROR=needs_error,
                BLOCK=min(COLUMNS, triton.next_power_of_2(vocab_size)),
                num_warps=WARPS,
            )
    return numbers.sum(0)
