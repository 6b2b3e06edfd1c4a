"""The memory of the tokens before a segment: a value that a call takes and returns.

Three forms with the same methods. `XLMemory` holds hidden states, as in the paper, and serves every kind and training.
`XLKeyValues` holds what attention makes of them, for evaluation and generation: nothing is projected twice. `XLWindow`
holds the tokens themselves, for models that were trained without memory and know no position but that in a segment.

In all of them lanes are aligned on the right: the last column of each lane is its newest position. Columns before a
lane's `lengths` last ones are masked, so an empty memory and a masked one are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.architectures.transformer_xl.config import Attending
from manyheads.errors import ShapeError
from manyheads.nn.kernels import policy

__all__ = ["XLKeyValues", "XLMemory", "XLStep", "XLWindow"]

# Slots of a buffer that stay empty at its front: a compiler makes programs of their own for 0 and 1 (see `XLStep`).
_FRONT = 2


@dataclass(frozen=True)
class _State(ABC):
    """The part that both forms share: the lanes, the valid length, and the context settings.

    Shape: lengths (lanes,) int64: positions that count.
    """

    lengths: Tensor
    attending: Attending

    @property
    @abstractmethod
    def columns(self) -> int:
        """Positions of the longest memory that a lane may have now, masked ones counted."""

    def valid(self) -> Bool[Tensor, "lanes columns"] | None:
        """Which columns count; None if all do (not looked up where the look would make a device wait)."""
        if self.columns == 0:
            return None
        if policy.can_look(self.lengths) and bool((self.lengths == self.columns).all()):
            return None
        columns = torch.arange(self.columns, device=self.lengths.device)
        return columns[None] >= (self.columns - self.lengths)[:, None]

    def reset(self, lanes: Bool[Tensor, " lanes"]) -> Self:
        """Forget what the lanes marked True remember.

        Raises: ShapeError: not one mark a lane.
        """
        if lanes.shape != self.lengths.shape:
            raise ShapeError(f"{tuple(lanes.shape)} marks do not fit {len(self.lengths)} lanes; give one a lane.")
        return replace(self, lengths=self.lengths.masked_fill(lanes.to(self.lengths.device), 0))

    def reorder(self, rows: Int[Tensor, "*rows"]) -> Self:
        """The lanes with these ids, in this order; see `protocols.SearchState.reorder`."""
        rows = rows.flatten()
        return self._each(lambda tensor, axis: tensor if axis is None else tensor.index_select(axis, rows))

    def clone(self) -> Self:
        """A copy that shares nothing, to branch."""
        return self._each(lambda tensor, _: tensor.clone())

    def detach(self) -> Self:
        """The same numbers, cut from whatever graph made them (`XLMemory.after` and searches cut already)."""
        return self._each(lambda tensor, _: tensor.detach())

    @abstractmethod
    def _each(self, change: Any) -> Self:
        """change(tensor, axis of the lanes or None) on every tensor."""

    def _added(self, new_len: int, lengths: Tensor | None) -> Tensor | int:
        """Positions of a segment that enter memory: all but the `ext_len` that the next segment reads again."""
        if lengths is None:
            return max(0, new_len - self.attending.ext_len)
        return (lengths - self.attending.ext_len).clamp(min=0)


@dataclass(frozen=True)
class XLMemory(_State):
    """The input of every layer at the positions before the segment (Dai et al. 2019, sec. 3.2), without gradient.

    Shape: layers: one (lanes, columns, d_model) a layer, columns at most `attending.memory_len`.
    """

    layers: tuple[Tensor, ...]

    @classmethod
    def empty(cls, lanes: int, num_layers: int, d_model: int, like: Tensor, attending: Attending) -> XLMemory:
        """No positions yet; device and dtype of `like`."""
        return cls(
            layers=tuple(like.new_empty(lanes, 0, d_model) for _ in range(num_layers)),
            lengths=torch.zeros(lanes, dtype=torch.int64, device=like.device),
            attending=attending,
        )

    @property
    def columns(self) -> int:
        return self.layers[0].shape[1]

    def after(
        self, inputs: Sequence[Float[Tensor, "lanes len d_model"]], lengths: Int[Tensor, " lanes"] | None
    ) -> XLMemory:
        """The memory after a segment: its own last positions and the segment's.

        Args:
            inputs: of every layer, at the segment's positions.
            lengths: real positions in each lane, padding on the right; None: all are.
        """
        added = self._added(inputs[0].shape[1], lengths)
        most = self._added(inputs[0].shape[1], None)
        columns = min(self.columns + int(most), self.attending.memory_len)
        rows = None
        if isinstance(added, Tensor):
            # Column j of the new memory is this one of the old memory and the segment in a row.
            steps = torch.arange(columns, device=added.device)
            rows = (steps + (self.columns + added - columns)[:, None]).clamp(min=0)
        layers = tuple(
            _newest(old, new.detach(), columns, int(most), rows) for old, new in zip(self.layers, inputs, strict=True)
        )
        return replace(self, layers=layers, lengths=(self.lengths + added).clamp(max=columns))

    def _each(self, change: Any) -> XLMemory:
        layers = tuple(change(layer, 0) for layer in self.layers)
        return replace(self, layers=layers, lengths=change(self.lengths, 0))


def _newest(old: Tensor, new: Tensor, columns: int, added: int, rows: Tensor | None) -> Tensor:
    """The last columns of old and new in a row, as a tensor of their own: a view would keep all of both alive."""
    old = old.to(new.dtype)
    if rows is not None:
        lanes = torch.arange(len(rows), device=rows.device)[:, None]
        return torch.cat([old, new], dim=1)[lanes, rows]
    if columns <= added:
        return new[:, added - columns : added].clone(memory_format=torch.contiguous_format)
    return torch.cat([old[:, old.shape[1] - (columns - added) :], new[:, :added]], dim=1)


@dataclass(frozen=True)
class XLKeyValues(_State):
    """Projected keys and values of the positions before the segment, in buffers with room behind them.

    A call consumes the state it is given: new positions are written into its buffers; `clone()` to branch.

    Shape: keys, values: one (lanes, heads, capacity, head_dim) a layer, of which columns `first` to `last` count;
        positions: one (heads, reach, head_dim) a layer: projected distances, farthest first, for up to `reach`
        positions; distance_biases: one (heads, reach) a layer, or none; first, last: () int64 on the CPU.
    Cost: appending copies a position a constant number of times, however long the sequence gets: a buffer has room for
        twice what must stay, and what stays moves to its front when it is full.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    distance_biases: tuple[Tensor, ...]
    first: Tensor
    last: Tensor

    @classmethod
    def empty(
        cls, lanes: int, num_layers: int, num_heads: int, head_dim: int, like: Tensor, attending: Attending
    ) -> XLKeyValues:
        """No positions yet; device and dtype of `like`."""
        none = tuple(like.new_empty(lanes, num_heads, 0, head_dim) for _ in range(num_layers))
        return cls(
            keys=none,
            values=none,
            positions=(),
            distance_biases=(),
            first=torch.zeros((), dtype=torch.int64),
            last=torch.zeros((), dtype=torch.int64),
            lengths=torch.zeros(lanes, dtype=torch.int64, device=like.device),
            attending=attending,
        )

    @property
    def columns(self) -> int:
        return int(self.last) - int(self.first)

    @property
    def reach(self) -> int:
        """How many positions, from the newest back, have their projected distances."""
        return self.positions[0].shape[1] if self.positions else 0

    def with_room(self, new_len: int, dtype: torch.dtype) -> XLKeyValues:
        """The same memory with room for a segment behind it.

        Buffers are a quarter longer than what they must hold, so a memory of n positions is moved once in n / 4 new
        ones, and within its buffer where that is long enough.
        """
        needed = self.columns + new_len
        if self.keys[0].dtype == dtype and int(self.last) + new_len <= self.keys[0].shape[2]:
            return self
        first, last = int(self.first), int(self.last)
        capacity = _FRONT + needed + max(16, needed // 4)
        end = _FRONT + last - first

        def moved(buffer: Tensor) -> Tensor:
            if buffer.dtype == dtype and buffer.shape[2] >= capacity:
                buffer[:, :, _FRONT:end] = buffer[:, :, first:last].clone()  # the two may overlap
                return buffer
            grown = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3], dtype=dtype)
            grown[:, :, _FRONT:end] = buffer[:, :, first:last]
            return grown

        return replace(
            self,
            keys=tuple(moved(buffer) for buffer in self.keys),
            values=tuple(moved(buffer) for buffer in self.values),
            first=torch.full_like(self.first, _FRONT),
            last=torch.full_like(self.last, end),
        )

    def after(self, new_len: int, lengths: Int[Tensor, " lanes"] | None) -> XLKeyValues:
        """The memory after a segment whose keys and values were written; see `XLMemory.after`."""
        added = self._added(new_len, lengths)
        most = int(self._added(new_len, None))
        columns = min(self.columns + most, self.attending.memory_len)
        last = self.last + most
        state = replace(self, first=last - columns, last=last, lengths=(self.lengths + added).clamp(max=columns))
        return state._aligned(most - added, int(self.first)) if isinstance(added, Tensor) else state

    def _aligned(self, missing: Int[Tensor, " lanes"], begin: int) -> XLKeyValues:
        """Every lane moved right over the columns that its own part of the segment did not fill."""
        first, last = int(self.first), int(self.last)
        columns = torch.arange(first, last, device=missing.device)
        source = (columns[None] - missing[:, None]).clamp(min=begin)[:, None, :, None]

        def moved(buffer: Tensor) -> Tensor:
            lanes, heads, _, width = buffer.shape
            buffer[:, :, first:last] = buffer.gather(2, source.expand(lanes, heads, last - first, width))
            return buffer

        return replace(
            self,
            keys=tuple(moved(buffer) for buffer in self.keys),
            values=tuple(moved(buffer) for buffer in self.values),
        )

    def _each(self, change: Any) -> XLKeyValues:
        return replace(
            self,
            keys=tuple(change(buffer, 0) for buffer in self.keys),
            values=tuple(change(buffer, 0) for buffer in self.values),
            positions=tuple(change(one, None) for one in self.positions),
            distance_biases=tuple(change(one, None) for one in self.distance_biases),
            first=change(self.first, None),
            last=change(self.last, None),
            lengths=change(self.lengths, 0),
        )


@dataclass(frozen=True)
class XLStep:
    """All that `TransformerXL.compute` needs; see `protocols.PlansSteps`.

    One program serves all steps if none of the numbers is 0 or 1 and no view is a whole buffer. So two slots stay free
    before the first position and behind the last, and there are two distances more than are needed.

    Shape: tokens (lanes, new_len) ids; keys, values, positions, distance_biases as in `XLKeyValues`, with room for the
        new positions; seen (1 or lanes, 1, new_len, columns + new_len) bool: what each new position may attend to.
    first, last: slots of the memory; the new positions go behind it.
    """

    tokens: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    distance_biases: tuple[Tensor, ...]
    first: int
    last: int
    seen: Tensor
    can_compile: bool

    @property
    def kind(self) -> tuple[object, ...]:
        """See `protocols.PlannedStep`."""
        return self.keys[0].dtype, len(self.tokens) == 1

    def for_compiler(self) -> XLStep:
        """See `protocols.PlannedStep`."""
        seen = self.seen.expand(len(self.tokens), -1, -1, -1).contiguous()
        # A compiler tells tensors that were made under inference mode from others; a copy is made under it.
        return replace(self, tokens=self.tokens.clone(), seen=seen)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new keys and values behind the memory of a layer; views of both together.

        Shape: (lanes, heads, new_len, head_dim) in, (lanes, heads, columns + new_len, head_dim) out.
        """
        end = self.last + key.shape[2]
        self.keys[layer][:, :, self.last : end] = key
        self.values[layer][:, :, self.last : end] = value
        return self.keys[layer][:, :, self.first : end], self.values[layer][:, :, self.first : end]

    def distances(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Projected, (heads, k_len, head_dim), and their own scores, (heads, k_len), if they have any."""
        positions = self.positions[layer]
        columns = slice(positions.shape[1] - (self.last + self.tokens.shape[1] - self.first), None)
        bias = self.distance_biases[layer][:, columns] if self.distance_biases else None
        return positions[:, columns], bias


@dataclass(frozen=True)
class XLWindow(_State):
    """The last tokens, to be read again along with what follows, in passes of at most `attending.memory_len` tokens.

    Al-Rfou et al. 2019 evaluate so; Dai et al. 2019, sec. 3.1, say what it costs.

    Shape: tokens: (lanes, columns) ids, columns below `attending.memory_len`.
    """

    tokens: Tensor

    @classmethod
    def empty(cls, lanes: int, like: Tensor, attending: Attending) -> XLWindow:
        """No tokens yet; device of `like`."""
        none = torch.zeros(lanes, 0, dtype=torch.int64, device=like.device)
        return cls(tokens=none, lengths=none.new_zeros(lanes), attending=attending)

    @property
    def columns(self) -> int:
        return self.tokens.shape[1]

    def with_new(
        self, tokens: Int[Tensor, "lanes new_len"], lengths: Int[Tensor, " lanes"]
    ) -> tuple[Int[Tensor, "lanes len"], Int[Tensor, " lanes"], Int[Tensor, "lanes new_len"]]:
        """Return old and new tokens of each lane in a row, its length, and the places of the new ones."""
        view = self.attending.memory_len
        old = self.lengths.minimum(view - lengths)  # each lane as if it were alone: what others add is not its matter
        columns = torch.arange(self.columns + tokens.shape[1], device=tokens.device)
        real = (columns >= self.columns - old[:, None]) & (columns < self.columns + lengths[:, None])
        order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :view]
        places = old[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return torch.cat([self.tokens, tokens], dim=1).gather(1, order), old + lengths, places

    def after(self, read: Int[Tensor, "lanes len"], lengths: Int[Tensor, " lanes"]) -> XLWindow:
        """The window after such a reading: all of it but the place of the next token."""
        columns = min(read.shape[1], self.attending.memory_len - 1)
        places = torch.arange(columns, device=read.device) + (lengths - columns)[:, None]
        tokens = read.gather(1, places.clamp(min=0))
        return replace(self, tokens=tokens, lengths=lengths.clamp(max=columns))

    def _each(self, change: Any) -> XLWindow:
        return replace(self, tokens=change(self.tokens, 0), lengths=change(self.lengths, 0))


def _register(cls: type) -> None:
    """Make a state a pytree: tensors are its leaves; how it is looked at is part of its structure."""
    names = [field.name for field in fields(cls) if field.name != "attending"]

    def flatten(state: Any) -> tuple[list[Any], Any]:
        return [getattr(state, name) for name in names], astuple(state.attending)

    def unflatten(values: Any, context: Any) -> Any:
        attending = Attending(**dict(zip((field.name for field in fields(Attending)), context, strict=True)))
        return cls(attending=attending, **dict(zip(names, values, strict=True)))

    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")


_register(XLMemory)
_register(XLKeyValues)
_register(XLWindow)
