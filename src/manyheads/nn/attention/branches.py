"""The key-value cache of hypotheses that share a part of their past, as in beam search."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from manyheads.nn.attention.planned import PlannedKeyValues, Slots
from manyheads.nn.attention.state import KeyValueState, State, register_state


@register_state
@dataclass(frozen=True)
class Branches:
    """A table that says which keys of its group each row sees; the caches of all layers share it.

    All layers need the same next table: the first layer computes it, the others reuse it.

    Shape: seen (groups, branches, capacity) bool; length and slots () int64 on the CPU: positions of each row, slots in
        use.
    """

    seen: Tensor
    length: Tensor
    slots: Tensor
    _next: dict[str, tuple[Any, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, groups: int, capacity: int, length: Tensor, device: torch.device) -> Branches:
        """Return one row per group, each with all of the first `length` slots."""
        seen = torch.arange(capacity, device=device) < int(length)
        return cls(seen=seen.expand(groups, 1, capacity).clone(), length=length, slots=length)

    def reorder(self, rows: Tensor) -> Branches:
        """Return rows that continue these, (new groups, new branches)."""
        asked, found = self._next.get("reorder", (None, None))
        if asked is not rows:
            _, branches, capacity = self.seen.shape
            groups = self.groups_of(rows)
            parents = rows - groups[:, None] * branches
            seen = self.seen if len(groups) == len(self.seen) else self.seen.index_select(0, groups)
            found = replace(self, seen=seen.gather(1, parents[:, :, None].expand(-1, -1, capacity)))
            self._next["reorder"] = rows, found
        return found  # type: ignore[no-any-return]

    def groups_of(self, rows: Tensor) -> Tensor:
        """Return the old group of each new group, (new groups,), in the order of the old groups."""
        return torch.div(rows[:, 0], self.seen.shape[1], rounding_mode="floor")

    def append(self, new_len: int) -> tuple[Branches, Tensor | None]:
        """Return the table with new_len more positions of every row, each visible to that row only; consumes this one.

        Returns: the table, with at least one free slot; and, if there was no space, the slots that some row sees,
            (groups, kept), which move to the front of a wider buffer in this order.
        """
        asked, found = self._next.get("append", (None, None))
        if asked != new_len:
            branches, count = self.seen.shape[1], self.seen.shape[1] * new_len
            room, kept = self, None
            if int(self.slots) + count >= self.seen.shape[2]:
                room, kept = self._with_room(count + 1)
            first = int(room.slots)
            own = torch.eye(branches, dtype=torch.bool, device=self.seen.device).repeat_interleave(new_len, dim=1)
            room.seen[:, :, first : first + count] = own
            found = replace(room, length=self.length + new_len, slots=room.slots + count), kept
            self._next["append"] = new_len, found
        return found  # type: ignore[no-any-return]

    def _with_room(self, count: int) -> tuple[Branches, Tensor]:
        """Return a wider table and the slots that are kept.

        It holds the visible slots in order, with twice the space for them and `count` more.
        """
        seen = self.seen[:, :, : int(self.slots)]
        alive = seen.any(dim=1)
        kept = int(alive.sum(dim=1).max()) if alive.numel() else 0
        order = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :kept]
        capacity = max(2 * (kept + count), 16 * seen.shape[1])
        grown = seen.new_zeros(*seen.shape[:2], capacity)
        grown[:, :, :kept] = seen.gather(2, order[:, None].expand(-1, seen.shape[1], -1))
        return replace(self, seen=grown, slots=torch.tensor(kept, device="cpu")), order


@register_state
@dataclass(frozen=True)
class BranchedKeyValueState(State):
    """Projected keys and values of several rows per group; the rows of a group share most of their past.

        >>> state = KeyValueState.empty(rows=2, num_heads=4, head_dim=8, like=torch.zeros(1))
        >>> state = state.append(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8))
        >>> state = BranchedKeyValueState.of(state).reorder(torch.tensor([[0, 0], [1, 1]]))
        >>> state = state.append(torch.randn(4, 4, 1, 8), torch.randn(4, 4, 1, 8))
        >>> state.filled()[0].shape, state.key.shape[0], int(state.branches.slots)
        (torch.Size([4, 4, 4, 8]), 2, 5)

    A group stores each key once, in a slot, and a table says which slots are the past of which row. When a search
    continues from other rows, only the table is copied, and no key; all rows of a group query its keys as one longer
    query. Slots that no row sees any more are removed when the buffer is full.

    Shape: key, value (groups, heads, capacity, head_dim), of which the first `branches.slots` are filled.
    """

    key: Tensor
    value: Tensor
    branches: Branches

    @classmethod
    def of(cls, state: KeyValueState, branches: Branches | None = None) -> BranchedKeyValueState:
        """Return one row per group. branches: those of another layer with a cache of the same length."""
        rows, _, capacity, _ = state.key.shape
        table = Branches.of(rows, capacity, state.length, state.key.device) if branches is None else branches
        return cls(key=state.key, value=state.value, branches=table)

    @property
    def rows(self) -> int:
        """groups x branches."""
        return self.branches.seen.shape[0] * self.branches.seen.shape[1]

    @property
    def length(self) -> Tensor:
        """Positions of each row. () int64 on the CPU"""
        return self.branches.length

    def append(self, key: Tensor, value: Tensor) -> BranchedKeyValueState:
        """Return the state with new positions of every row. key, value: (groups x branches, heads, new_len, head_dim).

        This state is consumed, as by `KeyValueState.append`.
        """
        planned, after = self.plan(key.shape[2])
        planned.write(key, value)
        return after

    def plan(self, new_len: int, slots: Slots | None = None) -> tuple[PlannedKeyValues, BranchedKeyValueState]:
        """As `KeyValueState.plan`."""
        branches, kept = self.branches.append(new_len)
        _, each, capacity = branches.seen.shape
        if slots is None:
            end = int(branches.slots)
            seen = branches.seen[:, None, :, :end]
            slots = Slots(length=int(self.length), first=end - each * new_len, end=end, seen=seen)
        key, value = self.key, self.value
        if kept is not None:
            key, value = _moved(key, kept, capacity), _moved(value, kept, capacity)
        return PlannedKeyValues(key, value, slots), BranchedKeyValueState(key, value, branches)

    def filled(self) -> tuple[Tensor, Tensor]:
        """Return copies of each row's own keys and values in order: (rows, heads, length, head_dim) each."""
        end = int(self.branches.slots)
        slots = Slots(length=int(self.length), first=end, end=end, seen=self.branches.seen[:, None, :, :end])
        return PlannedKeyValues(self.key, self.value, slots).filled()

    def reorder(self, rows: Tensor) -> BranchedKeyValueState:
        """Return rows that continue these; see `protocols.SearchState.reorder`. rows: (new groups, new branches)."""
        key, value = self.key, self.value
        if len(rows) != len(key):
            groups = self.branches.groups_of(rows)
            key, value = key.index_select(0, groups), value.index_select(0, groups)
        return BranchedKeyValueState(key, value, self.branches.reorder(rows))


def _moved(buffer: Tensor, kept: Tensor, capacity: int) -> Tensor:
    """Return a buffer of `capacity` slots that begins with the slots `kept`, (groups, kept)."""
    groups, heads, slots, head_dim = buffer.shape
    grown = buffer.new_empty(groups, heads, capacity, head_dim)
    # Copy whole rows of memory by their number: gather would look up every single entry.
    starts = slots * torch.arange(groups * heads, device=buffer.device).view(groups, heads, 1)  # `slots` can be 0
    rows = buffer.reshape(-1, head_dim).index_select(0, (starts + kept[:, None]).flatten())
    grown[:, :, : kept.shape[1]] = rows.view(groups, heads, kept.shape[1], head_dim)  # heads can be 0, too
    return grown
