"""Dropout (Srivastava et al. 2014): zero with probability `rate`, times 1 / (1 - rate) otherwise.

`F.dropout` is the formula. On a CPU it draws one random number per element in one thread. Here four elements share 64
random bits: 4.2 instead of 20.9 ms for 2M elements (decision 007).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.nn.kernels import policy

_LEVELS = 1 << 16
_FINAL = -0x61C8864680B583EB  # odd, from the golden ratio: the finaliser's multiplier
_row_keys = torch.zeros(0, dtype=torch.int64, device="cpu")
_row_range: tuple[int, int, int] | None = None
_token_keys: Tensor | None = None


def dropout(x: Tensor, rate: float, *, shared: bool = False) -> Tensor:
    """Zero each element with probability `rate` and divide the others by 1 - rate.

    At rate 0 return x itself, at rate 1 zeros.

    Args:
        x: any shape; the first axis counts the rows of a batch unless `shared`.
        shared: all rows of the batch use the same x, for example a table of positions.

    The random numbers come from torch's generator of the device, so `torch.manual_seed` replays them. On a CPU `rate`
    is rounded to the nearest 1/65536, and the divisor uses the rounded rate, so the expectation is exactly x. There the
    mask of a row depends on the generator and the row's number, not on the number of rows: see `numbered_rows`.
    Raises: ConfigError: rate is not from 0 to 1; on other devices and in compiled code torch's ValueError.
    """
    if not rate:
        return x
    if policy.uses_torch_dropout(x):
        return F.dropout(x, rate, training=True)
    if shared or x.dim() < 2 or not x.numel():
        return x * scaled_mask(x, rate)
    rows = x if _token_keys is None else x.flatten(0, 1)
    return x * RowMasks(rows.shape[0], rows[0].numel(), rate, x.device).of(rows, 0).view(x.shape)


@contextmanager
def numbered_rows(first: int, count: int, total: int) -> Iterator[None]:
    """Within the block, number the rows of a batch `first` to `first + count` of `total`; other ranks have the other
    rows.

    Each row then gets the mask that it has when one process holds the whole batch. A tensor with a multiple of `count`
    rows contains several copies of the batch, one after the other. Not safe for several threads.
    """
    global _row_range
    before, _row_range = _row_range, (first, count, total)
    try:
        yield
    finally:
        _row_range = before


@contextmanager
def numbered_tokens(starts: Tensor, positions: Tensor) -> Iterator[None]:
    """Within the block, the first two axes of x are one row of packed sequences, (1, tokens, ...).

    On a CPU each token then gets a mask of its own, by the number of its sequence in the batch and its position there,
    wherever it lies in the row; of several ranks each has the sequences that `numbered_rows` names. Not safe for
    several threads.

    Args:
        starts: (segments + 1,) where each sequence begins in the row, which they fill, and its end.
        positions: (tokens,) of each token in its sequence.
    """
    global _token_keys
    before = _token_keys
    if policy.shares_draws(starts.device):
        first = 0 if _row_range is None else _row_range[0]
        numbers = torch.arange(first, first + len(starts) - 1, device="cpu").repeat_interleave(starts.diff().long())
        _token_keys = _mixed_keys((numbers << 32) + positions)
    try:
        yield
    finally:
        _token_keys = before


def scaled_mask(x: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Return 0 for dropped and 1 / (1 - rate) for kept elements, in the shape and dtype of x.

    Args: generator: of the random numbers; None: torch's generator of the device.
    """
    if not policy.shares_draws(x.device) and generator is None:
        return F.dropout(torch.ones_like(x), rate, training=True)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    draws.random_(-(1 << 63), None, generator=generator)
    return _mask_of(x, draws.view(torch.int16)[: x.numel()].view(x.shape), rate)


class RowMasks:
    """Dropout masks of the rows of a batch, for some rows at a time.

    On a CPU the bits of one row are drawn and then mixed with the key of each row, so the generator advances by one
    row whatever the number of rows. Mixing is a multiplication by the row's odd key, an exclusive or of the two halves
    and another multiplication: as fast as drawing, and in several threads. On other devices each mask is drawn.

    Args:
        rows: number of rows of the batch.
        width: number of elements per row.
        rate: probability of a zero.
        device: of the batch.
    """

    def __init__(self, rows: int, width: int, rate: float, device: torch.device) -> None:
        self._rate = rate
        self._width = width
        self._drawn: Tensor | None = None
        if policy.shares_draws(device):
            self._drawn = torch.empty((width + 3) // 4, dtype=torch.int64, device=device).random_(-(1 << 63), None)
            self._keys = _keys_of(rows)

    def of(self, like: Tensor, first: int) -> Tensor:
        """Return the mask of the rows from `first` on, in the shape and dtype of `like`; see `scaled_mask`."""
        if self._drawn is None:
            return scaled_mask(like, self._rate)
        bits = torch.mul(self._keys[first : first + like.shape[0], None], self._drawn[None])
        bits ^= bits >> 32
        bits *= _FINAL
        return _mask_of(like, bits.view(torch.int16)[:, : self._width].reshape(like.shape), self._rate)


def _mask_of(x: Tensor, levels: Tensor, rate: float) -> Tensor:
    """Return `scaled_mask` of x from random levels, the lowest of which are dropped. levels: int16, shaped like x."""
    if not 0 <= rate <= 1:
        raise ConfigError(f"the dropout rate is {rate}; it must be from 0 to 1.")
    if rate == 1:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    dropped = min(round(rate * _LEVELS), _LEVELS - 1)
    least, factor = dropped - _LEVELS // 2, _LEVELS / (_LEVELS - dropped)
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ge(levels, least, out=mask)
    return mask.mul_(factor)


def _keys_of(rows: int) -> Tensor:
    """Return an odd key for each row of a tensor, from its number in the whole batch. (rows,) int64"""
    if _token_keys is not None and rows == len(_token_keys):
        return _token_keys
    if _row_range is None or not _row_range[1] or rows % _row_range[1]:
        return _first_keys(rows)
    first, count, total = _row_range
    copies = rows // count
    return _first_keys(copies * total).view(copies, total)[:, first : first + count].reshape(-1)


def _first_keys(count: int) -> Tensor:
    global _row_keys
    if len(_row_keys) < count:
        _row_keys = _mixed_keys(torch.arange(max(1024, 2 * count), device="cpu"))
    return _row_keys[:count]


def _mixed_keys(numbers: Tensor) -> Tensor:
    # uint64 arithmetic modulo 2**64 on int64 numbers: torch has no product of uint64.
    return _mixed(_mixed(numbers * _signed(0x9E3779B97F4A7C15))) | 1


def _mixed(values: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser (Steele et al. 2014) to 64 bits stored as int64; `data.sampler.mix` does too."""
    values = (values ^ _shifted_right(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted_right(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shifted_right(values, 31)


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers right without sign extension."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    """Return 64 unsigned bits as a signed int64 number."""
    return bits - (1 << 64) if bits >> 63 else bits
