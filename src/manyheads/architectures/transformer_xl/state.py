"""The memory of the tokens before a segment: a value that a call takes and returns.

`XLState` is the one state. What it remembers has two forms. `LayerInputs` holds the inputs of the layers, as in the
paper, and serves every kind and training. `KeyValues` holds their projections, for evaluation and generation, so that
nothing is projected twice.

In both, lanes are aligned on the right: the last column of each lane is its newest position. Columns before a lane's
last `lengths` ones are masked, so an empty memory and a masked one are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.architectures.transformer_xl.config import Attending
from manyheads.errors import ShapeError
from manyheads.nn.attention.state import State, register_state
from manyheads.nn.kernels import policy
from manyheads.nn.shapes import Bool, Int

# Slots that stay empty at the front of a buffer: a compiler makes separate programs for 0 and 1 (see `XLStep`).
_FRONT = 2


@dataclass(frozen=True)
class XLState(State):
    """The memory of the lanes of a batch, the number of valid positions, and the context settings.

    Shape: lengths (lanes,) int64: valid positions.
    """

    lengths: Tensor
    memory: LayerInputs | KeyValues
    attending: Attending

    @property
    def columns(self) -> int:
        """Positions in memory, including masked ones."""
        return self.memory.columns

    def valid(self) -> Bool[Tensor, "lanes columns"] | None:
        """Return which columns are valid; None: all (not checked where the check would make a device wait)."""
        if self.columns == 0:
            return None
        if policy.can_look(self.lengths) and bool((self.lengths == self.columns).all()):
            return None
        columns = torch.arange(self.columns, device=self.lengths.device)
        return columns[None] >= (self.columns - self.lengths)[:, None]

    def recent(self, memory_len: int) -> XLState:
        """Return the state of a model with a memory of `memory_len`, for one segment; for `LayerInputs` only."""
        columns = min(self.columns, memory_len)
        memory = cast(LayerInputs, self.memory).recent(columns)
        attending = replace(self.attending, memory_len=memory_len)
        return XLState(self.lengths.clamp(max=columns), memory, attending)

    def after(self, new_len: int, lengths: Int[Tensor, " lanes"] | None, inputs: Sequence[Tensor] = ()) -> XLState:
        """Return the state after a segment.

        The last `ext_len` positions do not enter memory, because the next segment reads them again.

        Args:
            new_len: positions of the segment, with padding.
            lengths: real positions in each lane, padding on the right; None: all are real.
            inputs: the segment's own `LayerInputs.layers`; not for `KeyValues`, into which `XLStep.write` has written.
        """
        most = max(0, new_len - self.attending.ext_len)
        columns = min(self.columns + most, self.attending.memory_len)
        first = self.columns + most - columns
        if lengths is None:
            memory = self.memory.kept(inputs, first, columns, None)
            return replace(self, memory=memory, lengths=(self.lengths + most).clamp(max=columns))
        added = (lengths - self.attending.ext_len).clamp(min=0)
        # Column j of the new memory is this one of the old memory followed by the segment.
        rows = torch.arange(columns, device=lengths.device)
        rows = (rows + (self.columns + added - columns)[:, None]).clamp(min=0)
        memory = self.memory.kept(inputs, first, columns, rows)
        return replace(self, memory=memory, lengths=(self.lengths + added).clamp(max=columns))

    def reset(self, lanes: Bool[Tensor, " lanes"]) -> XLState:
        """Return the memory of the lanes marked True to its beginning: empty, or zeros (see `Attending`).

        Raises: ShapeError: the number of marks differs from the number of lanes.
        """
        if lanes.shape != self.lengths.shape:
            raise ShapeError(
                f"{tuple(lanes.shape)} marks do not fit {len(self.lengths)} lanes; give one mark per lane."
            )
        lanes = lanes.to(self.lengths.device)
        if self.attending.initial_memory == "empty":
            return replace(self, lengths=self.lengths.masked_fill(lanes, 0))
        lengths = self.lengths.masked_fill(lanes, self.columns)
        return replace(self, lengths=lengths, memory=self.memory.zeroed(lanes))

    def reorder(self, rows: Int[Tensor, "*rows"]) -> XLState:
        """Return the lanes with these ids, in this order; see `protocols.SearchState.reorder`."""
        rows = rows.flatten()
        return replace(self, memory=self.memory.reorder(rows), lengths=self.lengths.index_select(0, rows))


@register_state
@dataclass(frozen=True)
class LayerInputs:
    """The input of every layer at the positions before the segment (Dai et al. 2019, sec. 3.2), without gradient.

    A model that was trained without memory knows only positions within a segment. To generate, it keeps the input of
    the embedding in place of the layers', which is the token ids, and reads them again with every new token (Al-Rfou et
    al. 2019; Dai et al. 2019, sec. 3.1, say what it costs).

    Shape: layers: one (lanes, columns, d_model) per layer, or a single (lanes, columns) of token ids.
    """

    layers: tuple[Tensor, ...]

    @property
    def columns(self) -> int:
        return self.layers[0].shape[1]

    @property
    def are_tokens(self) -> bool:
        return self.layers[0].dim() == 2

    def kept(self, inputs: Sequence[Tensor], first: int, columns: int, rows: Tensor | None) -> LayerInputs:
        """Return `columns` columns of this memory followed by the inputs: from `first` on, or each lane's `rows`.

        Shape: rows (lanes, columns).
        """
        return LayerInputs(
            tuple(_kept(old, new.detach(), first, columns, rows) for old, new in zip(self.layers, inputs, strict=True))
        )

    def recent(self, columns: int) -> LayerInputs:
        """Return the newest columns, as views."""
        return LayerInputs(tuple(layer[:, layer.shape[1] - columns :] for layer in self.layers))

    def reorder(self, rows: Int[Tensor, " rows"]) -> LayerInputs:
        return LayerInputs(tuple(layer.index_select(0, rows) for layer in self.layers))

    def zeroed(self, lanes: Bool[Tensor, " lanes"]) -> LayerInputs:
        return LayerInputs(tuple(layer.masked_fill(lanes[:, None, None], 0) for layer in self.layers))


def _kept(old: Tensor, new: Tensor, first: int, columns: int, rows: Tensor | None) -> Tensor:
    """Return columns of old and new, concatenated, as a tensor of its own: a view would keep all of both alive."""
    old = old.to(new.dtype)
    if rows is not None:
        lanes = torch.arange(len(rows), device=rows.device)[:, None]
        return torch.cat([old, new], dim=1)[lanes, rows]
    end = first + columns - old.shape[1]
    if first >= old.shape[1]:
        return new[:, first - old.shape[1] : end].clone(memory_format=torch.contiguous_format)
    return torch.cat([old[:, first:], new[:, :end]], dim=1)


@register_state
@dataclass(frozen=True)
class KeyValues:
    """Projected keys and values of the positions before the segment, in buffers with free space behind them.

    A call consumes the state that it receives: new positions are written into its buffers; `clone()` to branch.

    Shape: keys, values: one (lanes, heads, capacity, head_dim) per layer, of which columns `first` to `last` are in
        use; positions: one (heads, reach, head_dim) per layer: projected distances, farthest first, for up to `reach`
        positions; distance_biases: one (heads, reach) per layer, or none; first, last: () int64 on the CPU.
    Cost: appending copies a position a constant number of times, for a sequence of any length: a buffer is a quarter
        longer than its contents must be, and its contents move to the front when it is full.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    first: Tensor
    last: Tensor
    positions: tuple[Tensor, ...] = ()
    distance_biases: tuple[Tensor, ...] = ()

    @classmethod
    def zeros(cls, lanes: int, heads: Sequence[int], head_dim: int, columns: int, like: Tensor) -> KeyValues:
        """Return the projections of `columns` positions whose hidden states are zero; device and dtype of `like`.

        Args: heads: number of them in each layer.
        """
        buffers = tuple(like.new_zeros(lanes, count, columns, head_dim) for count in heads)
        first, last = (torch.tensor(count, dtype=torch.int64, device="cpu") for count in (0, columns))
        return cls(keys=buffers, values=buffers, first=first, last=last)

    @property
    def columns(self) -> int:
        return int(self.last) - int(self.first)

    @property
    def reach(self) -> int:
        """Number of positions, from the newest back, whose projected distances are stored."""
        return self.positions[0].shape[1] if self.positions else 0

    def with_room(self, new_len: int, dtype: torch.dtype) -> KeyValues:
        """Return the same memory with space for a segment behind it.

        Buffers are a quarter longer than their contents, so a memory of n positions is moved once in n / 4 new ones,
        and within its buffer where that is long enough.
        """
        first, last = int(self.first), int(self.last)
        needed = last - first + new_len
        if self.keys[0].dtype == dtype and last + new_len <= self.keys[0].shape[2]:
            return self
        capacity = _FRONT + needed + max(16, needed // 4)
        end = _FRONT + last - first

        def moved(buffer: Tensor) -> Tensor:
            if buffer.dtype == dtype and buffer.shape[2] >= capacity:
                buffer[:, :, _FRONT:end] = buffer[:, :, first:last].clone()  # the two may overlap
                return buffer
            grown = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3], dtype=dtype)
            grown[:, :, _FRONT:end] = buffer[:, :, first:last]
            return grown

        start, stop = torch.full_like(self.first, _FRONT), torch.full_like(self.last, end)
        return replace(self._each(moved), first=start, last=stop)

    def kept(self, inputs: Sequence[Tensor], first: int, columns: int, rows: Tensor | None) -> KeyValues:
        """See `LayerInputs.kept`; the segment is in the buffers already."""
        begin = int(self.first)
        start, end = begin + first, begin + first + columns

        def aligned(buffer: Tensor) -> Tensor:
            assert rows is not None
            lanes, heads, _, width = buffer.shape
            source = (begin + rows)[:, None, :, None].expand(lanes, heads, columns, width)
            buffer[:, :, start:end] = buffer.gather(2, source)
            return buffer

        memory = replace(self, first=self.first + first, last=self.first + (first + columns))
        return memory if rows is None else memory._each(aligned)

    def reorder(self, rows: Int[Tensor, " rows"]) -> KeyValues:
        return self._each(lambda buffer: buffer.index_select(0, rows))

    def zeroed(self, lanes: Bool[Tensor, " lanes"]) -> KeyValues:
        return self._each(lambda buffer: buffer.masked_fill(lanes[:, None, None, None], 0))

    def _each(self, change: Callable[[Tensor], Tensor]) -> KeyValues:
        """Return the memory with every buffer of keys or values changed."""
        keys, values = tuple(map(change, self.keys)), tuple(map(change, self.values))
        return replace(self, keys=keys, values=values)


@dataclass(frozen=True)
class XLStep:
    """The arguments of `TransformerXL.compute`; see `protocols.PlansSteps`.

    One program serves all steps if no number is 0 or 1 and no view is a whole buffer. So two slots stay free before the
    first position and behind the last, and there are two distances more than needed.

    Shape: tokens (lanes, new_len) ids; memory: with space for the new positions; seen (1 or lanes, 1, new_len,
        columns + new_len) bool: the positions that each new one may attend to.
    first, last: slots of the memory; the new positions go behind it.
    """

    tokens: Tensor
    memory: KeyValues
    first: int
    last: int
    seen: Tensor
    can_compile: bool

    @property
    def kind(self) -> tuple[object, ...]:
        return self.memory.keys[0].dtype, len(self.tokens) == 1

    def for_compiler(self) -> XLStep:
        seen = self.seen.expand(len(self.tokens), -1, -1, -1).contiguous()
        # A compiler distinguishes tensors created in inference mode from others; a copy is created in it.
        return replace(self, tokens=self.tokens.clone(), seen=seen)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values behind the memory of a layer. Returns: views of both together.

        Shape: (lanes, heads, new_len, head_dim) in, (lanes, heads, columns + new_len, head_dim) out.
        """
        keys, values, end = self.memory.keys[layer], self.memory.values[layer], self.last + key.shape[2]
        keys[:, :, self.last : end] = key
        values[:, :, self.last : end] = value
        return keys[:, :, self.first : end], values[:, :, self.first : end]

    def distances(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return projected distances, (heads, k_len, head_dim), and their own scores, (heads, k_len), or None."""
        positions, biases = self.memory.positions[layer], self.memory.distance_biases
        columns = slice(positions.shape[1] - (self.last + self.tokens.shape[1] - self.first), None)
        return positions[:, columns], biases[layer][:, columns] if biases else None


def _flatten(state: XLState) -> tuple[list[Any], Any]:
    return [state.lengths, state.memory], astuple(state.attending)


def _unflatten(values: Any, context: Any) -> XLState:
    """The context settings are part of the structure: they are not tensors."""
    names = (field.name for field in fields(Attending))
    lengths, memory = values
    return XLState(lengths, memory, Attending(**dict(zip(names, context, strict=True))))


pytree.register_pytree_node(
    XLState, _flatten, _unflatten, serialized_type_name=f"{XLState.__module__}.{XLState.__qualname__}"
)
