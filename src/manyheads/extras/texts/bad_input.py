"""Errors for bad input to the texts' modules: each is ours, and also of the type that torch or the text would raise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyheads.errors import ConfigError, ManyHeadsError, RequestError, ShapeError
from manyheads.nn.kernels import policy


class TextValueError(ConfigError, ValueError, RuntimeError, AssertionError):
    """A constructor's argument is out of range, or does not go with another."""


class TextIndexError(RequestError, IndexError):
    """A token id or a cluster's number is outside its table."""


class TextShapeError(ShapeError, RuntimeError, AssertionError):
    """A tensor has a wrong shape or type, or there are too many or too few of them."""


class TextNotImplementedError(ManyHeadsError, NotImplementedError):
    """A base class has no formula of its own."""


def check_at_least(least: int, **sizes: int) -> None:
    """Raises: TextValueError: a size is not a whole number of at least `least`."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise TextValueError(f"{name} is {size!r}; it must be a whole number of at least {least}.", fields=[name])


def check_rates(**rates: float) -> None:
    """Raises: TextValueError: a rate is not between 0 and 1."""
    for name, rate in rates.items():
        if not 0 <= rate <= 1:
            raise TextValueError(f"{name} is {rate!r}; it must be between 0 and 1.", fields=[name])


def check_ids(ids: Tensor, name: str, size: int) -> None:
    """Check token ids before a table is read.

    Raises: TextShapeError: they are not whole numbers. TextIndexError: an id is outside the table of `size` rows.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise TextShapeError(f"{name} has the type {ids.dtype}; it must be whole numbers: call {name}.long().")
    if policy.is_compiled() or not ids.numel():
        return
    lowest, highest = ids.min().item(), ids.max().item()
    if lowest < 0 or highest >= size:
        wrong = lowest if lowest < 0 else highest
        raise TextIndexError(
            f"{name} has the id {wrong}, but the ids are 0 to {size - 1}; make the model with n_token={highest + 1}"
            " or more, or check the vocabulary."
            if lowest >= 0
            else f"{name} has the id {wrong}, but the ids are 0 to {size - 1}; check the vocabulary."
        )


def check_shape(name: str, tensor: Tensor, wanted: Sequence[int | str], remedy: str = "") -> None:
    """Check a tensor's shape. wanted: its sizes; a name stands for any size.

    Raises: TextShapeError: another shape.
    """
    shape = tuple(tensor.shape)
    fits = len(shape) == len(wanted) and all(
        isinstance(size, str) or size == found for size, found in zip(wanted, shape, strict=True)
    )
    if not fits:
        sizes = ", ".join(map(str, wanted))
        raise TextShapeError(f"{name} has the shape {shape}; it must be ({sizes}){remedy and f': {remedy}'}.")
