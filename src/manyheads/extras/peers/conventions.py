"""Conversion of other libraries' masks to our descriptions: True = may attend, batch first.

    >>> from manyheads.nn import MultiHeadAttention
    >>> attention, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    >>> sizes = Sizes(batch=2, num_heads=4, q_len=5, k_len=5)
    >>> valid = from_valid_lens(torch.tensor([5, 3]))  # Dive into Deep Learning
    >>> blocked = from_blocked(torch.ones(5, 5, dtype=torch.bool).triu(1), sizes)  # torch's attn_mask
    >>> added = from_additive(torch.zeros(2, 1, 1, 5), sizes)  # transformers' extended mask
    >>> first = from_sequence_first(torch.ones(5, 5, 2))  # labml: (query, key, batch)
    >>> attention(x, mask=valid & blocked & added & first)[0].shape
    torch.Size([2, 5, 16])

A shape with two possible meanings is refused. The message names both, and the argument `axes` selects one:

    >>> from_blocked(torch.zeros(4, 5, 5) > 0, Sizes(batch=4, num_heads=4, q_len=5, k_len=5), axes="batch q_len k_len")
    Dense(pattern=...
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.errors import ShapeError
from manyheads.nn.attention.masks import Bias, Dense, Lengths, Mask
from manyheads.nn.kernels import modes
from manyheads.nn.shapes import check_tensors

# Layouts of other libraries by number of axes. "batch*heads" is torch's: heads vary fastest.
_READINGS = {
    1: ("k_len",),
    2: ("q_len k_len", "batch k_len"),
    3: ("batch q_len k_len", "heads q_len k_len", "batch*heads q_len k_len"),
    4: ("batch heads q_len k_len",),
}
_ORDER = ("batch", "heads", "q_len", "k_len")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes for which a mask is meant; without them (4, 5, 5) is ambiguous. k_len includes cached keys."""

    batch: int
    num_heads: int
    q_len: int
    k_len: int

    def of(self, axis: str) -> int:
        """Return the size of an axis."""
        named = {"batch": self.batch, "heads": self.num_heads, "q_len": self.q_len, "k_len": self.k_len}
        return self.batch * self.num_heads if axis == "batch*heads" else named[axis]


def from_valid_lens(valid_lens: Tensor) -> Lengths:
    """Convert valid lengths, as in Dive into Deep Learning: keys before the length may be attended to.

    Args: valid_lens: whole numbers, (batch,), or (batch, q_len) for one length per query.
    Differs: for a length of 0, d2l gives every key the same weight; here the output is zeros.
    Raises: ShapeError: another shape, or not whole numbers.
    """
    check_tensors(valid_lens=valid_lens)
    if valid_lens.dim() not in (1, 2) or valid_lens.is_floating_point() or valid_lens.dtype == torch.bool:
        raise ShapeError(
            f"valid_lens of shape {tuple(valid_lens.shape)} and type {valid_lens.dtype} must be whole numbers, (batch,)"
            " or (batch, q_len); a mask of True and False goes to from_allowed or from_blocked."
        )
    return Lengths(valid_lens)


def from_blocked(mask: Tensor, sizes: Sizes, axes: str | None = None) -> Dense:
    """Convert a mask with True (or non-zero) = blocked: torch's `attn_mask` and `key_padding_mask`, the official
    Transformer-XL.

    Args:
        mask: bool or whole numbers, of one of the shapes: (k_len), (q_len, k_len), (batch, k_len), (batch, q_len,
            k_len), (heads, q_len, k_len), (batch x heads, q_len, k_len), (batch, heads, q_len, k_len); an axis may be
            1.
        axes: the meaning, as "batch q_len k_len", "batch*heads q_len k_len", ...; None: determined from the sizes.

    Raises: ShapeError: the mask matches no meaning, or several different ones, or contains other numbers.
    """
    _refuse_numbers(mask, "from_blocked")
    return Dense(_four_axes(mask, sizes, axes) == 0)


def from_allowed(mask: Tensor, sizes: Sizes, axes: str | None = None) -> Dense:
    """Convert a mask with 0 (or False) = blocked: the Annotated Transformer, the fused tutorial, SDPA, 2-D of
    transformers.

    Args: see `from_blocked`.
    Raises: ShapeError: see `from_blocked`.
    """
    _refuse_numbers(mask, "from_allowed")
    return Dense(_four_axes(mask, sizes, axes) != 0)


def from_additive(mask: Tensor, sizes: Sizes, axes: str | None = None, blocked_at: float = -1e9) -> Mask:
    """Convert numbers that are added to the scaled scores: torch's float masks, transformers' extended masks, ALiBi.

    Args:
        mask: see `from_blocked`, of a floating type.
        axes: see `from_blocked`.
        blocked_at: numbers up to this one block, such as -inf and the lowest number of the mask's type; a row of only
            such numbers gives zeros, not equal weights.

    Raises: ShapeError: see `from_blocked`; or the mask is not of a floating type.
    """
    check_tensors(mask=mask)
    if not mask.is_floating_point():
        raise ShapeError(
            f"a mask of type {mask.dtype} cannot be added to scores; use from_blocked (True = blocked) or from_allowed"
            " (0 = blocked)."
        )
    values = _four_axes(mask, sizes, axes)
    blocked = (values <= blocked_at) | (values <= torch.finfo(values.dtype).min)
    return Bias(values.masked_fill(blocked, -torch.inf))


def from_sequence_first(mask: Tensor, sizes: Sizes | None = None) -> Dense:
    """Convert a mask with non-zero = may attend, (q_len or 1, k_len, batch or 1), as in labml.

    Args: sizes: checked if given.
    Raises: ShapeError: not three axes, or they do not match the sizes.
    """
    _refuse_numbers(mask, "from_sequence_first")
    if mask.dim() != 3:
        raise ShapeError(
            f"a mask of shape {tuple(mask.shape)} has {mask.dim()} axes; it must be (q_len, k_len, batch)."
        )
    if sizes is not None and not _fits(tuple(mask.shape), ["q_len", "k_len", "batch"], sizes):
        raise ShapeError(
            f"a mask of shape {tuple(mask.shape)} is not (q_len, k_len, batch), here"
            f" {(sizes.q_len, sizes.k_len, sizes.batch)}; where batch comes first, use from_allowed."
        )
    return Dense((mask != 0).permute(2, 0, 1)[:, None])


def _refuse_numbers(mask: Tensor, name: str) -> None:
    check_tensors(mask=mask)
    if mask.is_floating_point() and not modes.is_compiled() and not bool(((mask == 0) | (mask == 1)).all()):
        raise ShapeError(
            f"{name} was given numbers other than 0 and 1; if they are to be added to the scores, use from_additive."
        )


def _fits(shape: tuple[int, ...], axes: list[str], sizes: Sizes) -> bool:
    return all(size in (1, sizes.of(axis)) for size, axis in zip(shape, axes, strict=True))


def _four_axes(mask: Tensor, sizes: Sizes, axes: str | None) -> Tensor:
    """Return (batch or 1, heads or 1, q_len or 1, k_len or 1)."""
    given = tuple(mask.shape)
    readings = _READINGS.get(mask.dim(), ())
    if axes is not None:
        known = [reading for several in _READINGS.values() for reading in several]
        if axes not in known:
            raise ShapeError(f"axes is {axes!r}; it must be one of {known}.")
        if len(axes.split()) != mask.dim():
            raise ShapeError(f"axes is {axes!r}, but the mask has shape {given}.")
        readings = (axes,)
    fitting = {reading: _read(mask, reading, sizes) for reading in readings if _fits(given, reading.split(), sizes)}
    if not fitting:
        wanted = ", or ".join(f"({reading.replace(' ', ', ')})" for reading in readings) or "one to four axes"
        raise ShapeError(f"a mask of shape {given} does not fit {sizes}; it must be {wanted}; an axis may be 1.")
    # With an axis of 1 several meanings are equal.
    meanings = {tuple(read.shape): reading for reading, read in fitting.items()}
    if len(meanings) > 1:
        both = " or ".join(f"({reading.replace(' ', ', ')})" for reading in meanings.values())
        raise ShapeError(
            f"a mask of shape {given} can be read as {both}, for {sizes}; say which by axes={next(iter(fitting))!r} or"
            " the other, or give it four axes (batch, heads, q_len, k_len) with 1 where it is broadcast."
        )
    return next(iter(fitting.values()))


def _read(mask: Tensor, reading: str, sizes: Sizes) -> Tensor:
    axes = reading.split()
    if axes[0] == "batch*heads":
        rows = (sizes.batch, sizes.num_heads) if mask.shape[0] > 1 else (1, 1)
        return mask.reshape(*rows, *mask.shape[1:])
    shape = dict(zip(axes, mask.shape, strict=True))
    return mask.reshape([shape.get(axis, 1) for axis in _ORDER])
