"""The key-value cache of one layer during one step: the slots of the new keys are known, but not the keys.

A step has two parts. `plan` selects slots for the new positions and allocates space, in Python, depending on values.
`compute` projects, writes and attends. It makes no decisions, so it can be compiled as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """The slots of a step's new positions, the same in every layer.

    They are Python integers, so that compiled code does not have to read tensors.

    length: positions of each row before the step. first, end: range of the new slots. seen: the slots that each row of
    a group sees, (groups, 1, branches, end) bool; None: each row is a group of its own and sees all slots.
    """

    length: int
    first: int
    end: int
    seen: Tensor | None = None


@dataclass(frozen=True)
class PlannedKeyValues:
    """Keys and values of one layer, in buffers with space for the new ones.

        >>> state = KeyValueState.empty(rows=2, num_heads=4, head_dim=8, like=torch.zeros(1))
        >>> planned, after = state.plan(new_len=3)
        >>> keys, values = planned.write(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8)).filled()
        >>> keys.shape, int(after.length)
        (torch.Size([2, 4, 3, 8]), 3)

    Shape: key, value (groups, heads, capacity, head_dim), shared with the state after the step; capacity is greater
        than `slots.end`, because a view of the whole buffer would be compiled again.
    """

    key: Tensor
    value: Tensor
    slots: Slots

    @property
    def length(self) -> int:
        """Positions of each row before the step."""
        return self.slots.length

    def write(self, key: Tensor, value: Tensor) -> PlannedKeyValues:
        """Write the new positions. key, value: (rows, heads, new_len, head_dim)."""
        _write(self.key, key, self.slots)
        _write(self.value, value, self.slots)
        return self

    def shared(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return keys and values of each group, and `Slots.seen`; None if no rows share slots.

        Shape: (groups, heads, end, head_dim) each, and (groups, 1, branches, end).
        """
        return None if self.slots.seen is None else (*self._views(), self.slots.seen)

    def filled(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of each row in order of position: (rows, heads, length, head_dim) each.

        They are views, or copies if rows share slots.
        """
        keys, values = self._views()
        if self.slots.seen is None:
            return keys, values
        groups, _, branches, _ = self.slots.seen.shape
        slots = self.slots.seen.nonzero()[:, 3].view(groups, 1, -1, 1)  # (groups, 1, branches x length, 1)

        def of_rows(x: Tensor) -> Tensor:
            taken = x.gather(2, slots.expand(-1, x.shape[1], -1, x.shape[3]))
            # Lengths are given, because heads can be 0, and -1 would then be any number.
            by_row = taken.view(*taken.shape[:2], branches, slots.shape[2] // branches, taken.shape[3])
            return by_row.transpose(1, 2).flatten(0, 1)

        return of_rows(keys), of_rows(values)

    def _views(self) -> tuple[Tensor, Tensor]:
        return self.key[:, :, : self.slots.end], self.value[:, :, : self.slots.end]


def _write(buffer: Tensor, new: Tensor, slots: Slots) -> None:
    groups, heads, _, head_dim = buffer.shape
    branches = 1 if slots.seen is None else slots.seen.shape[2]
    by_group = new.reshape(groups, branches, heads, new.shape[2], head_dim).transpose(1, 2)
    buffer[:, :, slots.first : slots.end] = by_group.flatten(2, 3)
