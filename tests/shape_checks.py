"""Checks the tensor shapes that signatures state, in the tests: jaxtyping and beartype, once for each kind of call.

A check takes ten times as long as what it checks in a small model, and a test that trains or searches repeats the same
calls hundreds of times. Only functions whose signatures state shapes are checked, and within a file of tests each of
them only when its arguments' types, shapes, dtypes, plain values or modules' sizes are new to it, and only for the
first `MOST_KINDS` of such kinds.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import jaxtyping
import torch
from beartype import beartype
from beartype.roar import BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception

__all__ = ["MOST_KINDS", "forget", "install"]

_SHAPED = re.compile(r"\b(Float|Int|Bool|Num|Shaped)\[")
_PLAIN = (bool, str, type(None), torch.dtype, torch.device)
_LARGEST_SIZE = 4096  # an integer above it is no size but a seed
MOST_KINDS = 24
_SEEN: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_MODULES: WeakKeyDictionary[torch.nn.Module, tuple[Hashable, Hashable]] = WeakKeyDictionary()
_jaxtyped = jaxtyping.jaxtyped


def install(packages: list[str]) -> None:
    """From here on, what these packages define is checked; to be called before they are imported."""
    checker = ModuleType("manyheads_shape_checker")  # the hook wants an importable name
    checker.check = _check  # type: ignore[attr-defined]
    sys.modules[checker.__name__] = checker
    jaxtyping.jaxtyped = jaxtyped  # the name that the import hook writes before each definition
    jaxtyping.install_import_hook(packages, "manyheads_shape_checker.check")


def forget() -> None:
    """Check every kind of call anew."""
    _SEEN.clear()


def jaxtyped(function: Any = None, *, typechecker: Any) -> Any:
    """As `jaxtyping.jaxtyped`, but for the calls that are like one that was checked."""
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    owners = inspect.getmro(function) if inspect.isclass(function) else (function,)
    annotations = [one for owner in owners for one in getattr(owner, "__annotations__", {}).values()]
    if not any(_SHAPED.search(str(annotation)) for annotation in annotations):
        return function  # its signature or its fields state no shape; mypy checks the rest
    if not inspect.isclass(function):
        return _once_each(function, lambda: _with_all_names(function, typechecker))
    if is_dataclass(function) and "__init__" in vars(function):
        plain = function.__init__
        function.__init__ = _once_each(plain, lambda: _with_all_names(plain, typechecker))
    return function


def _with_all_names(function: Any, typechecker: Any) -> Any:
    """The function that checks each call. Its signature may name what its file imports for type checkers alone.

    While the check is made the file has these names, and afterwards it lacks them again: code that used one would fail
    in the tests as it does elsewhere.
    """
    names = vars(sys.modules[function.__module__])
    added = {name: value for name, value in _typing_names(function.__module__).items() if name not in names}
    names.update(added)
    try:
        return _jaxtyped(function, typechecker=typechecker)
    finally:
        for name in added:
            del names[name]


@functools.cache
def _typing_names(module: str) -> dict[str, Any]:
    """What a file imports under `if TYPE_CHECKING:`, by name."""
    source = getattr(sys.modules[module], "__file__", None)
    body = ast.parse(Path(source).read_text("utf-8")).body if source else []
    named: dict[str, Any] = {}
    for block in body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            imports = [one for one in block.body if isinstance(one, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module(imports, []), source, "exec"), named)  # noqa: S102
    return named


def _once_each(function: Any, checking: Callable[[], Callable[..., Any]]) -> Any:
    """A function of which each kind of call is checked once. checking: gives the one that checks."""
    checked: Callable[..., Any] | None = None  # made when first needed: a function within a function is seldom

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal checked
        seen = _SEEN[function.__code__]
        if len(seen) >= MOST_KINDS:
            return function(*arguments, **named)
        key = tuple(map(_kind, arguments)), tuple((name, _kind(named[name])) for name in named)
        if key in seen:
            return function(*arguments, **named)
        if checked is None:
            checked = checking()
        result = checked(*arguments, **named)
        seen.add(key)
        return result

    return call


def _kind(value: Any) -> Hashable:
    """What a check of a value can depend on."""
    if isinstance(value, torch.Tensor):
        # Rows of unlike lengths have no shape.
        return type(value), None if value.is_nested else tuple(value.shape), value.dtype
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, int):
        return min(value, _LARGEST_SIZE)
    if isinstance(value, torch.nn.Module):
        return _kind_of_module(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(_kind, value))
    return type(value)


def _kind_of_module(module: torch.nn.Module) -> Hashable:
    """Its class, settings and sizes, and those of the modules in it."""
    own = vars(module)
    if "_modules" not in own:
        return type(module)  # its __init__ has only begun
    count = len(own), len(module._parameters), len(module._buffers), len(module._modules)
    known, found = _MODULES.get(module, (None, None))
    if known != count:  # new here, or still being made
        settings = tuple(
            (name, repr(value))
            for name, value in own.items()
            if name not in _OF_EVERY_MODULE and (isinstance(value, (bool, int, float, str)) or is_dataclass(value))
        )
        tensors = (*module._parameters.items(), *module._buffers.items())
        sizes = tuple((name, None if one is None else tuple(one.shape)) for name, one in tensors)
        parts = tuple((name, part and _kind_of_module(part)) for name, part in module._modules.items())
        found = hash((type(module), settings, sizes, parts))
        _MODULES[module] = count, found
    return found


def _check(function: Any) -> Any:
    """beartype, but not for `Self` (understood on whole classes only) and protocols that cannot be checked."""
    try:
        return beartype(function)
    except (BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception):
        return function
