"""Checks the tensor shapes that signatures state, in the tests: jaxtyping and beartype, once for each kind of call.

A check of one call takes longer than many small models' steps, and a test that trains repeats the same calls hundreds
of times. Within a test, a function is therefore checked when it meets arguments whose types, shapes, dtypes or plain
values it has not met before; another call of the same kind goes straight to the function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import jaxtyping
import torch
from beartype import beartype
from beartype.roar import BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception

__all__ = ["forget", "install"]

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device)
_SEEN: set[Hashable] = set()
_jaxtyped = jaxtyping.jaxtyped


def install(packages: list[str]) -> None:
    """From here on, what these packages define is checked; to be called before they are imported."""
    checker = ModuleType("manyheads_shape_checker")  # the hook wants an importable name
    checker.check = _check  # type: ignore[attr-defined]
    sys.modules[checker.__name__] = checker
    jaxtyping.jaxtyped = jaxtyped  # the name that the import hook writes before each definition
    jaxtyping.install_import_hook(packages, "manyheads_shape_checker.check")


def forget() -> None:
    """Check every kind of call anew, as each test does."""
    _SEEN.clear()


def jaxtyped(function: Any = None, *, typechecker: Any) -> Any:
    """As `jaxtyping.jaxtyped`, but for the calls that are like one that was checked."""
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if not inspect.isfunction(function):
        return _jaxtyped(function, typechecker=typechecker)
    checked: Callable[..., Any] | None = None  # made when first needed: a function within a function is seldom

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal checked
        key = (function.__code__, tuple(map(_kind, arguments)), tuple((name, _kind(named[name])) for name in named))
        if key in _SEEN:
            return function(*arguments, **named)
        if checked is None:
            checked = _jaxtyped(function, typechecker=typechecker)
        result = checked(*arguments, **named)
        _SEEN.add(key)
        return result

    return call


def _kind(value: Any) -> Hashable:
    """What a check of an argument can depend on. Of modules: which one, since its sizes decide what it returns."""
    if isinstance(value, torch.Tensor):
        return type(value), tuple(value.shape), value.dtype
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.nn.Module):
        return id(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(_kind, value))
    return type(value)


def _check(function: Any) -> Any:
    """beartype, but not for `Self` (understood on whole classes only) and protocols that cannot be checked."""
    try:
        return beartype(function)
    except (BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception):
        return function
