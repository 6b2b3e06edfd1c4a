"""The types of tensors with their shapes in signatures: jaxtyping's, where it is installed.

    from manyheads.nn.shapes import Float, Int
    def forward(tokens: Int[Tensor, "batch len"]) -> Float[Tensor, "batch len d_model"]: ...

The tests check these shapes at run time, and mypy and editors read them as plain tensors. Without jaxtyping they are
documentation only, so that the modules of `nn/` and the models need nothing but torch. `check_tensors` refuses what is
no tensor at all, such as an array of numpy; `check_axes` also other axes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.errors import ShapeError, TensorTypeError

__all__ = ["Bool", "Float", "Int", "check_axes", "check_tensors", "no_tensor"]

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ModuleNotFoundError:

        class _Unchecked:
            """`Float[Tensor, "batch len"]` is `Tensor`."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = _Unchecked


def check_tensors(**given: object) -> None:
    """Raises: TensorTypeError: an argument, given by its name, is neither a tensor nor None."""
    for name, x in given.items():
        if x is not None and not isinstance(x, Tensor):
            raise no_tensor(name, x)


def check_axes(name: str, x: object, axes: str, width: int | None = None) -> None:
    """Check an argument. axes: of the tensor, as "batch, length, width"; "..." for any number. width: the last one's.

        >>> check_axes("x", torch.zeros(2, 5, 16), "batch, length, d_model", width=16)

    Raises: TensorTypeError: it is no tensor. ShapeError: it has other axes, or another width.
    """
    if not isinstance(x, Tensor):
        raise no_tensor(name, x, axes)
    wanted = axes.count(",") + 1
    if (x.dim() < wanted - 1 if axes.startswith("...") else x.dim() != wanted) or width not in (None, x.shape[-1]):
        sizes = "" if width is None else f", and the last one {width}"
        raise ShapeError(f"{name} has shape {tuple(x.shape)}; its axes must be ({axes}){sizes}.")


def no_tensor(name: str, x: object, axes: str = "") -> TensorTypeError:
    """Return the error for an argument that is no tensor, with what makes a tensor of it. axes: their names.

    >>> str(no_tensor("query", [[1.0]], "length, width"))
    'query is list; give a tensor (length, width): torch.as_tensor(query).'
    """
    wanted = f"give a tensor{axes and f' ({axes})'}"
    try:
        dtype = torch.as_tensor(x).dtype
    except (TypeError, ValueError, RuntimeError):  # words, lists of several lengths, or of tensors
        return TensorTypeError(f"{name} is {type(x).__name__}; {wanted}.")
    of = name if name.isidentifier() else "..."
    usual = torch.get_default_dtype()
    # The numbers of numpy and of lists of them are float64, which the weights of a module seldom are.
    to_usual = f", dtype={usual}" if dtype.is_floating_point and dtype != usual else ""
    return TensorTypeError(f"{name} is {type(x).__name__}; {wanted}: torch.as_tensor({of}{to_usual}).")
