"""Dropout (Srivastava et al. 2014): zero with probability `rate`, times 1 / (1 - rate) otherwise.

`F.dropout` is the formula. On a CPU it draws a number for every element in one thread; here four elements share 64
bits, which takes 4.2 ms in place of 20.9 for 2M numbers (decision 007).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.nn.kernels import policy

__all__ = ["RowMasks", "dropout", "numbered_rows", "scaled_mask"]

_LEVELS = 1 << 16
_FINAL = -0x61C8864680B583EB  # odd, from the golden ratio: the finaliser's multiplier
_row_keys = torch.zeros(0, dtype=torch.int64)
_place: tuple[int, int, int] | None = None


def dropout(x: Tensor, rate: float, *, shared: bool = False) -> Tensor:
    """Zero each number with probability `rate` and divide the rest by 1 - rate; x itself at rate 0.

    Args:
        x: its first axis counts the rows of a batch, unless
        shared: what it holds belongs to all rows alike.

    The numbers come from torch's generator of the device, so `torch.manual_seed` replays them. On a CPU four numbers
    share 64 bits, several times as fast as torch's own dropout (decision 007); the probability is then `rate` to the
    nearest 1/65536, and the divisor is that of the rounded rate, so the expectation is exactly x. There, what a row
    loses depends on the generator and the row's number alone, not on how many others there are: see `numbered_rows`.
    """
    if not rate:
        return x
    if policy.uses_torch_dropout(x):
        return F.dropout(x, rate, training=True)
    if shared or x.dim() < 2 or not x.numel():
        return x * scaled_mask(x, rate)
    return x * RowMasks(x.shape[0], x[0].numel(), rate, x.device).of(x, 0)


@contextmanager
def numbered_rows(first: int, count: int, total: int) -> Iterator[None]:
    """Within the block, a batch's rows are number `first` to `first + count` of `total`, of which others are elsewhere.

    So each loses what it would lose in the whole batch. Tensors with a multiple of `count` rows hold the batch more
    than once, one copy after the other. Not for several threads at once.
    """
    global _place
    before, _place = _place, (first, count, total)
    try:
        yield
    finally:
        _place = before


def scaled_mask(x: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Zeros, and 1 / (1 - rate) where x is kept; in the shape and type of x. generator: None is the device's own."""
    if not policy.shares_draws(x.device) and generator is None:
        return F.dropout(torch.ones_like(x), rate, training=True)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    draws.random_(-(1 << 63), None, generator=generator)
    return _mask_of(x, draws.view(torch.int16)[: x.numel()].view(x.shape), rate)


class RowMasks:
    """The masks of a batch's rows, some at a time: see `dropout`, of which they are the second factor.

    On a CPU one row is drawn, and mixed with each row's number when its turn comes, so the generator moves on by one
    row, however many there are. Mixing is a multiplication by the row's odd key, an exclusive or of the halves, and
    another multiplication: as fast as drawing, and shared among threads. Elsewhere each mask is drawn by itself.

    Args:
        rows: of the batch.
        width: numbers of a row.
        rate: of dropout.
        device: of the batch.
    """

    def __init__(self, rows: int, width: int, rate: float, device: torch.device) -> None:
        self._rate = rate
        self._width = width
        self._drawn: Tensor | None = None
        if policy.shares_draws(device):
            self._drawn = torch.empty((width + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
            self._keys = _keys_of(rows)

    def of(self, like: Tensor, first: int) -> Tensor:
        """The mask of the rows from `first` on, in the shape and type of `like`."""
        if self._drawn is None:
            return scaled_mask(like, self._rate)
        bits = torch.mul(self._keys[first : first + like.shape[0], None], self._drawn[None])
        bits ^= bits >> 32
        bits *= _FINAL
        return _mask_of(like, bits.view(torch.int16)[:, : self._width].reshape(like.shape), self._rate)


def _mask_of(x: Tensor, levels: Tensor, rate: float) -> Tensor:
    """Zeros where a level is among the lowest, in the shape and type of x. Uses `levels` up: int16, shaped alike."""
    dropped = min(round(rate * _LEVELS), _LEVELS - 1)
    least, factor = dropped - _LEVELS // 2, _LEVELS / (_LEVELS - dropped)
    if x.dtype is torch.bfloat16 and dropped:
        # Whole numbers all the way, in a third of the time: a comparison's outcome would have to change its type.
        # What is clamped is least - 1 or least; the sum, modulo 2^16, is then 0 or the bits of the factor.
        bits = _bits_of(factor)
        first = (bits * (1 - least) + _LEVELS // 2) % _LEVELS - _LEVELS // 2
        return torch.rsub(levels.clamp_(least - 1, least), first, alpha=-bits).view(torch.bfloat16)
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ge(levels, least, out=mask)
    return mask.mul_(factor)


@cache
def _bits_of(number: float) -> int:
    """Those of its nearest bfloat16, as a whole number of 16 bits with a sign."""
    return int(torch.tensor(number, dtype=torch.bfloat16).view(torch.int16))


def _keys_of(rows: int) -> Tensor:
    """An odd key for each of a tensor's rows, by its number in the whole batch. (rows,)"""
    if _place is None or not _place[1] or rows % _place[1]:
        return _first_keys(rows)
    first, count, total = _place
    copies = rows // count
    return _first_keys(copies * total).view(copies, total)[:, first : first + count].reshape(-1)


def _first_keys(count: int) -> Tensor:
    global _row_keys
    if len(_row_keys) < count:
        # uint64 arithmetic modulo 2**64 on int64 numbers: torch has no product of uint64.
        numbers = torch.arange(max(1024, 2 * count), device="cpu") * _signed(0x9E3779B97F4A7C15)
        _row_keys = _mixed(_mixed(numbers)) | 1
    return _row_keys[:count]


def _mixed(values: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014), as `data.sampler.mix`, of the same 64 bits as int64."""
    values = (values ^ _shifted_right(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted_right(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shifted_right(values, 31)


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """The bits of int64 numbers moved right, with zeros before them and not the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    """The int64 number of 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
