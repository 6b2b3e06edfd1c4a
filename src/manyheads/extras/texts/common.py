"""What the modules of all texts share: errors, checks of input, signatures of several editions, kept weights.

Every error for bad input is ours, and also of the type that torch or the text's own code raises for the mistake.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, ManyHeadsError, RequestError, ShapeError
from manyheads.nn.kernels import modes, policy
from manyheads.nn.shapes import check_tensors, explained, no_tensor

_REQUIRED = inspect.Parameter.empty


class TextValueError(ConfigError, ValueError, TypeError, ZeroDivisionError, RuntimeError, AssertionError):
    """A constructor's argument is out of range, or does not go with another."""


class TextIndexError(RequestError, IndexError):
    """A token id or a cluster's number is outside its table."""


class TextShapeError(ShapeError, RuntimeError, AssertionError):
    """A tensor has a wrong shape or type, or there are too many or too few of them."""


class TextNotImplementedError(ManyHeadsError, NotImplementedError):
    """A base class has no formula of its own."""


_MADE: dict[tuple[type[Exception], ...], type[ManyHeadsError]] = {}


def also(kind: type[ManyHeadsError], *others: type[Exception]) -> type[ManyHeadsError]:
    """Return an error that is of our kind, and of the types that torch or the text's own code raises for the mistake.

    >>> issubclass(also(ShapeError, RuntimeError), ShapeError)
    True
    """

    def restored(error: ManyHeadsError) -> tuple[Any, ...]:
        return _make, (kind, others, error.args)  # a class without a name of its own cannot be pickled by name

    key = (kind, *(other for other in others if not issubclass(kind, other)))
    if key not in _MADE:
        body = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": restored}
        _MADE[key] = type(kind.__name__, key, body)
    return _MADE[key]


def explain(names: dict[str, Any]) -> None:
    """Give all functions and modules of a text torch's errors as sentences. names: `globals()` of its Python module.

    A call that works is not changed: see `nn.shapes.explained`.
    """
    for name, value in list(names.items()):
        if getattr(value, "__module__", "") != names["__name__"]:
            continue
        if inspect.isfunction(value) and not name.startswith("_"):
            names[name] = explained(value)
        elif isinstance(value, type) and issubclass(value, nn.Module):
            for method, function in list(vars(value).items()):
                if inspect.isfunction(function) and not method.startswith("_"):
                    setattr(value, method, explained(function))


def _make(kind: type[ManyHeadsError], others: tuple[type[Exception], ...], arguments: tuple[Any, ...]) -> Exception:
    return also(kind, *others)(*arguments)


def read_arguments(
    name: str, editions: Sequence[str], given: Sequence[Any], named: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Return the number of the edition whose signature fits the arguments of a call, and the arguments by name.

        >>> read_arguments("Attention", ("width, dropout=0", "key_size, query_size, width"), (8,), {"dropout": 0.5})
        (0, {'width': 8, 'dropout': 0.5})

    Raises: ConfigError, which is also a TypeError: no signature fits.
    """
    for edition, text in enumerate(editions):
        try:
            bound = _signature(text).bind(*given, **named)
        except TypeError:
            continue
        bound.apply_defaults()
        return edition, bound.arguments
    shown = ", ".join([*map(repr, given), *(f"{key}={value!r}" for key, value in named.items())])
    wanted = " or ".join(f"{name}({text})" for text in editions)
    raise also(ConfigError, TypeError)(f"{name}({shown}) fits no edition of the text; write {wanted}.")


@cache
def _signature(text: str) -> inspect.Signature:
    """Return the signature of a list of names, some with a default: a whole number, True, False or None."""
    defaults = {"True": True, "False": False, "None": None}
    parameters = []
    for one in text.split(", "):
        name, has_default, value = one.partition("=")
        default = (defaults[value] if value in defaults else int(value)) if has_default else _REQUIRED
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)


def check_heads(width: object, num_heads: object, names: tuple[str, str], *others: type[Exception]) -> None:
    """Check that a number of heads divides a width.

    Args: names: of width and heads in the text. others: what the text's code or torch raises for such heads.
    """
    numbers = isinstance(width, int) and isinstance(num_heads, int)
    if not numbers or num_heads < 1 or width < 1 or width % num_heads:  # type: ignore[operator]
        raise also(ConfigError, *others)(
            f"{names[0]} {width} cannot be divided among {names[1]} {num_heads}: both must be whole numbers above 0,"
            f" and {names[1]} must divide {names[0]}; change one of them."
        )


def check_at_least(least: int, **sizes: int) -> None:
    """Raises: TextValueError: a size is not a whole number of at least `least`."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise TextValueError(f"{name} is {size!r}; it must be a whole number of at least {least}.", fields=[name])


def check_rates(**rates: float) -> None:
    """Raises: TextValueError: a rate is no number from 0 to 1."""
    for name, rate in rates.items():
        if not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise TextValueError(f"{name} is {rate!r}; it must be a number from 0 to 1.", fields=[name])


def dropout_layer(rate: float, name: str = "dropout") -> nn.Dropout:
    """Return torch's dropout. Raises: TextValueError: see `check_rates`."""
    check_rates(**{name: rate})
    return nn.Dropout(rate)


def check_axes(name: str, x: object, axes: str, *others: type[Exception]) -> None:
    """Check that an argument is a tensor with these axes, such as "batch, length, width".

    Args: others: what torch or the text's code raises for another number of axes.
    """
    shape, names = shape_of(name, x, axes), axes.split(", ")
    if len(shape) != len(names):
        remedy = ""
        if "batch" in names and len(shape) == len(names) - 1:
            remedy = f"; of one sequence without a batch make a batch of one: {name}.unsqueeze({names.index('batch')})"
        raise also(ShapeError, *others)(
            f"{name} has shape {shape}, {len(shape)} axes; it must have {len(names)}, ({axes}){remedy}."
        )


def check_shape(name: str, x: object, wanted: Sequence[int | str], remedy: str = "") -> None:
    """Check a tensor's shape. wanted: its sizes; a name stands for any size, and "..." at the start for any axes.

    Raises: TextShapeError: another shape.
    """
    sizes = ", ".join(map(str, wanted))
    shape = shape_of(name, x, sizes)
    last = wanted[1:] if wanted[:1] == ["..."] else wanted
    fits = (len(shape) == len(wanted) or (last is not wanted and len(shape) >= len(last))) and all(
        isinstance(size, str) or size == found for size, found in zip(last[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise TextShapeError(f"{name} has the shape {shape}; it must be ({sizes}){remedy and f': {remedy}'}.")


def can_be_read(x: Tensor) -> bool:
    """Return whether a tensor has numbers: a compiler, `meta` and transforms of `torch.func` have shapes only."""
    return policy.has_values(x) and not modes.is_transformed()


def fits(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether one shape can be expanded to another: it may lack first axes, and have 1 for a size."""
    return len(one) <= len(other) and all(a in (1, b) for a, b in zip(one[::-1], other[::-1], strict=False))


def shape_of(name: str, x: object, axes: str) -> tuple[int, ...]:
    """Return a tensor's shape. axes: their names, for the message. Raises: TensorTypeError: it is no tensor."""
    if not isinstance(x, Tensor):
        raise no_tensor(name, x, axes)
    return tuple(x.shape)


def check_ids(ids: Tensor, name: str, size: int, remedy: str = "make the model with n_token={} or more") -> None:
    """Check token ids before a table is read. remedy: for an id that is too large; {} stands for the size it needs.

    Raises: TextShapeError: they are not whole numbers. TextIndexError: an id is outside the table of `size` rows.
    """
    check_tensors(**{name: ids})
    if ids.dtype not in (torch.int64, torch.int32):
        raise also(TextShapeError, TypeError)(
            f"{name} has the type {ids.dtype}; it must be whole numbers: call {name}.long()."
        )
    if not (can_be_read(ids) and ids.numel()):
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= size:
        wrong = lowest if lowest < 0 else highest
        makes_larger = f"{remedy.format(highest + 1)}, or " if lowest >= 0 else ""
        raise TextIndexError(
            f"{name} has the id {wrong}, but the ids are 0 to {size - 1}; {makes_larger}check the vocabulary."
        )


def table_of_positions(count: int, d_model: int) -> Tensor:
    """Return sines and cosines, (1, count, d_model), in torch's default type and by the operations of the texts.

    In float32 it differs from `nn.sinusoidal_table`, which is exact, by up to 3e-4 near position 5,000.
    """
    frequency = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10_000.0) / d_model))
    angle = torch.arange(count).unsqueeze(1) * frequency
    table = torch.zeros(count, d_model)
    table[:, 0::2], table[:, 1::2] = angle.sin(), angle[:, : d_model // 2].cos()
    return table.unsqueeze(0)


def refuse_added(mask: Tensor) -> None:
    """Refuse a mask of numbers that are added to the scores, where 0 means blocked: 0 allows in such a mask."""
    if not (mask.is_floating_point() and can_be_read(mask)) or bool(((mask == 0) | (mask == 1)).all()):
        return
    raise also(ShapeError, ValueError)(
        f"the mask of shape {tuple(mask.shape)} has numbers other than 0 and 1, as one that is added to the scores;"
        " here 0 means blocked: give mask == 0 if 0 allows in yours."
    )


class KeepsWeights(nn.Module):
    """A module that keeps the weights of its last call as an attribute, with their gradient, as the texts do.

    Copies (`copy.deepcopy`) and pickles of it have the numbers of these weights without the gradient, because torch
    cannot copy a tensor in the middle of a graph. The weights are no part of the state dict.
    """

    kept: ClassVar[str] = "attention_weights"

    def __init__(self) -> None:
        super().__init__()
        setattr(self, self.kept, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, self.kept: _detached(self.__dict__[self.kept])}


def _detached(kept: Any) -> Any:
    if isinstance(kept, list):
        return [_detached(one) for one in kept]
    return kept.detach() if isinstance(kept, Tensor) else kept
