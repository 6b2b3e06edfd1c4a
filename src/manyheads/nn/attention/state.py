"""The key-value cache of one attention layer: a value that a call takes and returns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.nn.attention.planned import PlannedKeyValues, Slots

_State = TypeVar("_State")


def register_state(cls: type[_State]) -> type[_State]:
    """Make a dataclass a pytree, so that compile, export and checkpointing can take it apart. Its fields are leaves."""
    names = [field.name for field in fields(cast(Any, cls)) if field.init]

    def flatten(state: Any) -> tuple[list[Any], None]:
        return [getattr(state, name) for name in names], None

    def flatten_with_keys(state: Any) -> tuple[list[Any], None]:
        return [(pytree.GetAttrKey(name), getattr(state, name)) for name in names], None

    def unflatten(values: Any, _: Any) -> Any:
        return cls(**dict(zip(names, values, strict=True)))

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


@register_state
@dataclass(frozen=True)
class KeyValueState(State):
    """Projected keys and values of the positions seen so far.

        >>> state = KeyValueState.empty(rows=2, num_heads=4, head_dim=8, like=torch.zeros(1))
        >>> state = state.append(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8))
        >>> state.filled()[0].shape, state.reorder(torch.tensor([1, 1, 0])).key.shape[0]
        (torch.Size([2, 4, 3, 8]), 3)

    Shape: key (rows, heads, capacity, head_dim) and value (rows, heads, capacity, value_dim), of which the first
        `length` positions are filled; length () int64 on the CPU.
    """

    key: Tensor
    value: Tensor
    length: Tensor

    @classmethod
    def empty(
        cls, rows: int, num_heads: int, head_dim: int, like: Tensor, *, value_dim: int | None = None
    ) -> KeyValueState:
        """Return a state without positions; device and dtype of `like`. value_dim: of a value; None: head_dim."""
        key = like.new_empty(rows, num_heads, 0, head_dim)
        value = key if value_dim in (None, head_dim) else like.new_empty(rows, num_heads, 0, value_dim)
        return cls(key=key, value=value, length=torch.zeros((), dtype=torch.int64, device="cpu"))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.key.shape[0]

    def append(self, key: Tensor, value: Tensor) -> KeyValueState:
        """Return the state with new positions after the old ones. key, value: (rows, heads, new_len, head_dim).

        This state is consumed: new positions are written into its buffer if they fit; otherwise the buffer doubles.
        """
        planned, after = self.plan(key.shape[2], dtype=key.dtype)
        planned.write(key, value)
        return after

    def plan(
        self, new_len: int, slots: Slots | None = None, dtype: torch.dtype | None = None
    ) -> tuple[PlannedKeyValues, KeyValueState]:
        """Return this state for a step of new_len positions, and the state after the step. This state is consumed.

        Args:
            slots: those of another layer with a cache of the same length.
            dtype: of the new keys and values; None: as the old ones.
        """
        if slots is None:
            length = int(self.length)
            slots = Slots(length=length, first=length, end=length + new_len)
        key, value, dtype = self.key, self.value, dtype or self.key.dtype
        if slots.end >= key.shape[2] or key.dtype != dtype:
            key, value = self._grown(slots.end + 1, dtype)
        after = KeyValueState(key=key, value=value, length=self.length + new_len)
        return PlannedKeyValues(key, value, slots), after

    def filled(self) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values in use: (rows, heads, length, head_dim) each."""
        length = int(self.length)
        return self.key[:, :, :length], self.value[:, :, :length]

    def reorder(self, rows: Tensor) -> KeyValueState:
        """Return the rows with these ids, (new_rows,), in this order."""
        return replace(self, key=self.key.index_select(0, rows), value=self.value.index_select(0, rows))

    def _grown(self, needed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values in buffers of that type: at least `needed` positions, twice as many as before."""
        capacity, filled = max(16, 2 * self.key.shape[2], needed), int(self.length)

        def grown(buffer: Tensor) -> Tensor:
            wider = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3], dtype=dtype)
            if filled:
                wider[:, :, :filled] = buffer[:, :, :filled]
            return wider

        return grown(self.key), grown(self.value)
