"""States as values: dataclasses that compile, export and checkpointing can take apart."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

_State = TypeVar("_State")


def register_state(cls: type[_State]) -> type[_State]:
    """Make a dataclass a pytree. Its fields are leaves, or pytrees themselves; a field that is None is no leaf."""
    names = [field.name for field in fields(cast(Any, cls)) if field.init]

    def flatten_with_keys(state: Any) -> tuple[list[Any], tuple[str, ...]]:
        given = tuple(name for name in names if getattr(state, name) is not None)
        return [(pytree.GetAttrKey(name), getattr(state, name)) for name in given], given

    def flatten(state: Any) -> tuple[list[Any], tuple[str, ...]]:
        values, given = flatten_with_keys(state)
        return [value for _, value in values], given

    def unflatten(values: Any, given: Any) -> Any:
        return cls(**{**dict.fromkeys(names), **dict(zip(given, values, strict=True))})

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls


class State:
    """A registered state, whose copies branch a search."""

    def clone(self) -> Self:
        """Return a copy that shares no tensor with this one."""
        copy: Self = pytree.tree_map(torch.clone, self)
        return copy
