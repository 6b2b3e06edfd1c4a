"""A key-value cache during one step whose bookkeeping is done: what is left is what a compiler can read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Place", "PlacedKeyValueState"]


@dataclass(frozen=True)
class Place:
    """Where a step's new positions go, the same in every layer. Numbers are no tensors, so no compiler has to look.

    length: positions of each row before the step. first, end: the slots of the new ones. seen: which slots each row of
    a group sees, (groups, 1, branches, end) bool; None: a row is a group, and sees them all.
    """

    length: int
    first: int
    end: int
    seen: Tensor | None


@dataclass(frozen=True)
class PlacedKeyValueState:
    """One layer's keys and values, with room for the new ones: a step writes them and looks at all.

        >>> state = KeyValueState.empty(rows=2, num_heads=4, head_dim=8, like=torch.zeros(1))
        >>> state = state.append(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8))
        >>> placed, after = state.placed(new_len=1)
        >>> placed.append(torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8)).filled()[0].shape
        torch.Size([2, 4, 4, 8])
        >>> int(after.length)
        4

    Shape: key, value (groups, heads, capacity, head_dim), the buffers of the state that it was made of and of the one
        that comes after; capacity is greater than `place.end`, so that a view never is the whole buffer.
    """

    key: Tensor
    value: Tensor
    place: Place

    @property
    def length(self) -> int:
        """Positions of each row before the step."""
        return self.place.length

    @property
    def is_shared(self) -> bool:
        """Whether several rows share a group's slots."""
        return self.place.seen is not None

    def append(self, key: Tensor, value: Tensor) -> PlacedKeyValueState:
        """Write the new positions. key, value: (rows, heads, new_len, head_dim)."""
        _write(self.key, key, self.place)
        _write(self.value, value, self.place)
        return self

    def shared(self) -> tuple[Tensor, Tensor, Tensor]:
        """As `BranchedKeyValueState.shared`."""
        assert self.place.seen is not None
        return *self.filled(), self.place.seen

    def filled(self) -> tuple[Tensor, Tensor]:
        """Views of what is in the slots up to the end: (groups, heads, end, head_dim) each."""
        return self.key[:, :, : self.place.end], self.value[:, :, : self.place.end]


def _write(buffer: Tensor, new: Tensor, place: Place) -> None:
    groups, heads, _, head_dim = buffer.shape
    by_group = new.reshape(groups, -1, heads, new.shape[2], head_dim).transpose(1, 2)
    buffer[:, :, place.first : place.end] = by_group.flatten(2, 3)
