"""The key-value cache of hypotheses that branch from one another, as those of a beam do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyheads.nn.attention.state import KeyValueState, register_state

__all__ = ["BranchedKeyValueState"]


@dataclass(frozen=True)
class BranchedKeyValueState:
    """Projected keys and values of several rows a group, where rows have most of their past in common.

        >>> state = KeyValueState.empty(rows=2, num_heads=4, head_dim=8, like=torch.zeros(1))
        >>> state = state.append(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8))
        >>> state = BranchedKeyValueState.of(state).reorder(torch.tensor([[0, 0], [1, 1]]))
        >>> state = state.append(torch.randn(4, 4, 1, 8), torch.randn(4, 4, 1, 8))
        >>> state.filled()[0].shape, state.key.shape[0], int(state.slots)
        (torch.Size([4, 4, 4, 8]), 2, 5)

    A key is kept once a group, in a slot, and each row knows which slots are its own past. So when a search goes on
    from other rows than before, what is copied is who sees what, and no key; and all rows of a group ask all its keys
    as one longer query. Slots that no row sees any more are dropped when the buffer is full.

    Shape: key, value (groups, heads, capacity, head_dim), of which the first `slots` are filled; seen (groups,
        branches, capacity) bool; length and slots () int64 on the CPU: positions of each row, slots in use.
    """

    key: Tensor
    value: Tensor
    seen: Tensor
    length: Tensor
    slots: Tensor

    @classmethod
    def of(cls, state: KeyValueState) -> BranchedKeyValueState:
        """One row a group, each with all it has."""
        rows, _, capacity, _ = state.key.shape
        seen = torch.arange(capacity, device=state.key.device) < int(state.length)
        return cls(
            key=state.key,
            value=state.value,
            seen=seen.expand(rows, 1, capacity).clone(),
            length=state.length,
            slots=state.length,
        )

    @property
    def rows(self) -> int:
        """groups x branches."""
        return self.seen.shape[0] * self.seen.shape[1]

    def append(self, key: Tensor, value: Tensor) -> BranchedKeyValueState:
        """The state with new positions of every row. key, value: (groups x branches, heads, new_len, head_dim).

        Uses this state up, as `KeyValueState.append` does.
        """
        groups, branches, _ = self.seen.shape
        new_len = key.shape[2]
        count = branches * new_len
        room = self
        if int(self.slots) + count > self.key.shape[2] or self.key.dtype != key.dtype:
            room = self._with_room(count, key.dtype)
        first = int(room.slots)
        for buffer, new in ((room.key, key), (room.value, value)):
            by_group = new.view(groups, branches, *new.shape[1:]).transpose(1, 2)
            buffer[:, :, first : first + count].view(by_group.shape).copy_(by_group)
        own = torch.eye(branches, dtype=torch.bool, device=room.seen.device).repeat_interleave(new_len, dim=1)
        room.seen[:, :, first : first + count] = own
        return replace(room, length=self.length + new_len, slots=room.slots + count)

    def _with_room(self, count: int, dtype: torch.dtype) -> BranchedKeyValueState:
        """The slots that somebody sees, in their order, in a buffer with room for `count` more, and twice as many."""
        slots = int(self.slots)
        seen = self.seen[:, :, :slots]
        alive = seen.any(dim=1)
        kept = int(alive.sum(dim=1).max()) if alive.numel() else 0
        order = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :kept]
        capacity = max(2 * (kept + count), 16 * seen.shape[1])

        def moved(buffer: Tensor) -> Tensor:
            groups, heads, _, head_dim = buffer.shape
            grown = buffer.new_empty(groups, heads, capacity, head_dim, dtype=dtype)
            grown[:, :, :kept] = buffer.gather(2, order[:, None, :, None].expand(-1, heads, -1, head_dim))
            return grown

        still = seen.gather(2, order[:, None].expand(-1, seen.shape[1], -1))
        grown_seen = seen.new_zeros(*seen.shape[:2], capacity)
        grown_seen[:, :, :kept] = still
        return replace(self, key=moved(self.key), value=moved(self.value), seen=grown_seen, slots=torch.tensor(kept))

    def shared(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of keys and values (groups, heads, slots, head_dim), and which of them each row sees (groups, 1,
        branches, slots)."""
        slots = int(self.slots)
        return self.key[:, :, :slots], self.value[:, :, :slots], self.seen[:, None, :, :slots]

    def filled(self) -> tuple[Tensor, Tensor]:
        """Copies of each row's own keys and values, in the order of positions: (rows, heads, length, head_dim) each."""
        keys, values, seen = self.shared()
        groups, _, branches, _ = seen.shape
        slots = seen.nonzero()[:, 3].view(groups, 1, -1, 1)  # (groups, 1, branches x length, 1)

        def of_rows(x: Tensor) -> Tensor:
            taken = x.gather(2, slots.expand(-1, x.shape[1], -1, x.shape[3]))
            by_row = taken.view(groups, x.shape[1], branches, int(self.length), x.shape[3]).transpose(1, 2)
            return by_row.flatten(0, 1)

        return of_rows(keys), of_rows(values)

    def reorder(self, rows: Tensor) -> BranchedKeyValueState:
        """Rows that continue these, (new groups, new branches); see `protocols.SearchState.reorder`. Uses this up."""
        old_groups, branches, capacity = self.seen.shape
        groups = torch.div(rows[:, 0], branches, rounding_mode="floor")
        parents = rows - groups[:, None] * branches
        key, value, seen = self.key, self.value, self.seen
        if len(groups) != old_groups:  # those that are left keep their order
            key, value, seen = (x.index_select(0, groups) for x in (key, value, seen))
        return replace(self, key=key, value=value, seen=seen.gather(1, parents[:, :, None].expand(-1, -1, capacity)))

    def clone(self) -> BranchedKeyValueState:
        """A copy that shares nothing, to branch a search."""
        return BranchedKeyValueState(**{name: getattr(self, name).clone() for name in self.__dataclass_fields__})


register_state(BranchedKeyValueState, "key", "value", "seen", "length", "slots")
