"""The types of tensors with their shapes in signatures: jaxtyping's, where it is installed.

    from manyheads.nn.shapes import Float, Int
    def forward(tokens: Int[Tensor, "batch len"]) -> Float[Tensor, "batch len d_model"]: ...

The tests check these shapes at run time, and mypy and editors read them as plain tensors. Without jaxtyping they are
documentation only, so that the modules of `nn/` and the models need nothing but torch. `check_tensors` refuses what is
no tensor at all, such as an array of numpy; `check_axes` also other axes. `explained` reads the same signatures after a
call has failed, so that torch's error becomes a sentence about the arguments, and a call that works costs no check.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from manyheads.errors import ArgumentError, ManyHeadsError, ShapeError, TensorTypeError, is_out_of_memory
from manyheads.nn.kernels import modes

__all__ = ["Bool", "Float", "Int"]

Called = TypeVar("Called", bound=Callable[..., Any])
FAILURES = (RuntimeError, TypeError, IndexError, ValueError, AttributeError)
"""The errors that torch raises for arguments that do not fit."""
_OF_TYPES = "scalar type|same dtype|not implemented for|datatype|infer output|Integral|overflow|bool (dtype|tensor)"
_OF_IDS = "range in self|out of (bounds|DATA)|Expected idx"
_OF_SHAPES = "must match the size|does not broadcast|cannot be multiplied|[Ee]xpected size"

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
    """Raises: TensorTypeError: an argument, given by its name, is no tensor."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
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


def check_targets(hidden: Tensor, targets: Tensor, keep: Tensor, d_model: int | None = None) -> None:
    """Raises: ShapeError: hidden states, their targets and the marks of those to keep have different shapes."""
    check_axes("hidden", hidden, "..., d_model", d_model)
    if not hidden.shape[:-1] == targets.shape == keep.shape or keep.dtype != torch.bool:
        raise ShapeError(
            f"hidden has shape {tuple(hidden.shape)}, targets {tuple(targets.shape)} and keep {tuple(keep.shape)} of"
            f" {keep.dtype}; targets and keep must have the shape of hidden without its last axis, and keep is bool:"
            " targets != pad_id."
        )


def check_vectors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises: ShapeError: not all have as many axes, or there are several batch sizes. TensorTypeError: one is no
    tensor.
    """
    given = query, key, value
    if not query.dim() == key.dim() == value.dim():
        remedy = "; give all of them as (batch, length, width), or all as (length, width)."
    elif query.dim() == 3 and query.shape[0] != 1 and any(x.shape[0] not in (1, query.shape[0]) for x in given):
        remedy = (
            ", read as (batch, length, width): they must have one batch size; where the length comes first, give"
            " x.transpose(0, 1)."
        )
    else:
        return
    raise ShapeError(f"query, key and value have shapes {', '.join(str(tuple(x.shape)) for x in given)}{remedy}")


def check_sizes(**sizes: object) -> None:
    """Raises: ArgumentError: an argument, given by its name, is no whole number of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | torch.SymInt) or size < 1:
            raise ArgumentError(f"{name} is {size!r}; it must be a whole number of at least 1.", fields=[name])


def check_rates(**rates: object) -> None:
    """Raises: ArgumentError: an argument, given by its name, is no number from 0 to 1."""
    for name, rate in rates.items():
        if not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise ArgumentError(f"{name} is {rate!r}; it must be a number from 0 to 1.", fields=[name])


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


def explained(function: Called) -> Called:
    """Return the function with a sentence in place of torch's error for arguments that do not fit its signature.

    Raises: ShapeError, TensorTypeError: see `fault_of`; of the types that torch raises, too.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if modes.is_compiled():  # a graph cannot break within `try`
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except FAILURES as error:
            fault = fault_of(function, error, *args, **kwargs)
            if fault is error:
                raise
            raise fault from error  # which may come from a part of the caller's, such as a hook

    return cast(Called, call)


def fault_of(function: Callable[..., Any], error: Exception, *args: Any, **kwargs: Any) -> Exception:
    """Return an error that says which argument of a failed call does not fit; the given error if all of them fit.

    Args: function: its signature has the shapes. error: what the call raised.
    """
    if isinstance(error, ManyHeadsError) or is_out_of_memory(error) or "CUDA" in str(error):
        return error
    parameters = inspect.signature(function).parameters
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return error
    is_of_types = re.search(_OF_TYPES, str(error))
    module = given.get("self")
    weights = getattr(module, "parameters", lambda: ())()
    other = next((("the module's weights", one.dtype) for one in weights if one.is_floating_point()), None)
    sizes = {axis: (size, type(module).__name__) for axis, size in getattr(module, "__dict__", {}).items()}
    suspect = ""  # the first tensor without a floating type, if its axes are not named
    for name, x in given.items():
        found = re.match(
            r"(int \| )?(Tensor(?: \| Sequence\[Tensor\])?|(Float|Int|Bool)\[Tensor, '([^']*)'\])( \| None)?$",
            re.sub(r"<class '|'>|torch\.", "", str(parameters[name].annotation)),
        )
        if found is None or (x is None and found[5]) or (isinstance(x, int) and found[1]):
            continue
        kind, axes = found[3], (found[4] or "").split()
        if not isinstance(x, Tensor):
            return no_tensor(name, x, _shown(axes))
        fault = kind and (_fault_of_kind(name, x, kind) or _fault_of_shape(name, x, axes, sizes))
        suspect = suspect or ("" if kind or x.is_floating_point() else name)
        other = other or ((name, x.dtype) if x.is_floating_point() else None)
        if not fault and is_of_types and other is not None and x.is_floating_point() and x.dtype != other[1]:
            fault = TensorTypeError(
                f"{name} is of {x.dtype}, but {other[0]} of {other[1]}; give both one type, for example"
                f" {name}.to({other[1]})."
            )
        if fault:
            return fault
    if suspect and is_of_types:
        return _fault_of_kind(suspect, given[suspect], "Float") or error
    shapes = [f"{name} {tuple(x.shape)}" for name, x in given.items() if isinstance(x, Tensor)]
    if len(shapes) > 1 and re.search(_OF_SHAPES, str(error)):
        return ShapeError(f"the shapes do not fit one another, {', '.join(shapes)}: {str(error).rstrip('.')}.")
    if shapes and isinstance(error, IndexError) and re.search("tuple index|Dimension", str(error)):
        return ShapeError(f"{' or '.join(shapes)} has too few axes: {error}.")
    return _fault_of_ids(given, error) or error


def _fault_of_kind(name: str, x: Tensor, kind: str) -> ShapeError | None:
    if kind == ("Float" if x.is_floating_point() else "Bool" if x.dtype == torch.bool else "Int"):
        return None
    wanted = {
        "Float": f"numbers of a floating type: {name}.float()",
        "Int": f"whole numbers: {name}.long()",
        "Bool": f"True and False, for example {name} != 0",
    }
    return TensorTypeError(f"{name} is of {x.dtype}; give {wanted[kind]}.")


def _shown(axes: list[str]) -> str:
    return ", ".join("..." if axis[0] == "*" else axis for axis in axes)


def _fault_of_shape(name: str, x: Tensor, axes: list[str], sizes: dict[str, tuple[Any, str]]) -> ShapeError | None:
    """Compare a shape with the names of its axes. sizes: of the names so far, each with the argument that has it."""
    found: list[Any] = list(x.shape)
    if axes and axes[0][0] == "*" and len(found) >= len(axes) - 1:
        rest = len(found) - len(axes) + 1
        found = [tuple(found[:rest]), *found[rest:]]
    if len(found) != len(axes):
        return ShapeError(f"{name} has shape {tuple(x.shape)}; its axes must be ({_shown(axes)}).")
    for axis, size in zip(axes, found, strict=True):
        known, other = sizes.setdefault(axis, (size, f"{name} {tuple(x.shape)}"))
        if known != size and axis.lstrip("*").isidentifier():
            return ShapeError(
                f"{name} has shape {tuple(x.shape)}, ({_shown(axes)}), so {axis.lstrip('*')} is {size}, but it is"
                f" {known} in {other}; both must be equal: change one of them."
            )
    return None


def _fault_of_ids(given: dict[str, Any], error: Exception) -> ShapeError | None:
    """Return the fault of ids outside a table, which a CPU finds."""
    ids = [(name, x) for name, x in given.items() if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)]
    if not isinstance(error, IndexError | RuntimeError) or not re.search(_OF_IDS, str(error)):
        return None
    for name, x in ids:
        if x.numel() and not x.is_meta:
            return ShapeError(
                f"{name} has numbers from {int(x.min())} to {int(x.max())}, and the table does not have them all"
                f" ({error}); check the vocabulary, or make the module for a larger one."
            )
    return None
