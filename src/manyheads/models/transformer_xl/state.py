"""The memory of the tokens before a segment: a value that a call takes and returns.

`XLState` is the one state. What it remembers has two forms. `LayerInputs` holds the inputs of the layers, as in the
paper, and serves every kind and training. A `KeyValueCache` holds their projections, for evaluation and generation, so
that nothing is projected twice.

In both, lanes are aligned on the right: the last column of each lane is its newest position. Columns before a lane's
last `lengths` ones are masked, so an empty memory and a masked one are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.models.composites import check_marks
from manyheads.models.transformer_xl.config import Attending
from manyheads.nn.attention.cache import CacheStep, KeyValueCache, valid_columns
from manyheads.nn.kernels import policy
from manyheads.nn.pytrees import State, register_state

if TYPE_CHECKING:
    from manyheads.nn.shapes import Bool, Int


@dataclass(frozen=True)
class XLState(State):
    """The memory of the lanes of a batch, and the context settings.

    Shape: positions: one (heads, reach, head_dim) per layer: projected distances, farthest first, for up to `reach`
        positions; distance_biases: one (heads, reach) per layer, or none; both for keys and values only.
    """

    memory: LayerInputs | KeyValueCache
    attending: Attending
    positions: tuple[Tensor, ...] = ()
    distance_biases: tuple[Tensor, ...] = ()

    @property
    def lanes(self) -> int:
        """Sequences read side by side."""
        return self.memory.rows

    @property
    def lengths(self) -> Int[Tensor, " lanes"]:
        """Valid positions of each lane."""
        return self.memory.row_lengths().clamp(max=self.columns)

    @property
    def columns(self) -> int:
        """Positions in memory, including masked ones."""
        return self.memory.columns

    @property
    def reach(self) -> int:
        """Number of positions, from the newest back, whose projected distances are stored."""
        return self.positions[0].shape[1] if self.positions else 0

    def valid(self) -> Bool[Tensor, "lanes columns"] | None:
        """Return which columns are valid; None: all (not checked where the check would make a device wait)."""
        return self.memory.valid()

    def recent(self, memory_len: int) -> XLState:
        """Return the state of a model with a memory of `memory_len`, for one segment; for `LayerInputs` only."""
        memory = cast(LayerInputs, self.memory).recent(min(self.columns, memory_len))
        return XLState(memory, replace(self.attending, memory_len=memory_len))

    def after(self, new_len: int, lengths: Int[Tensor, " lanes"] | None, inputs: Sequence[Tensor] = ()) -> XLState:
        """Return the state after a segment.

        The last `ext_len` positions do not enter memory, because the next segment reads them again.

        Args:
            new_len: positions of the segment, with padding.
            lengths: real positions in each lane, padding on the right; None: all are real.
            inputs: the segment's own `LayerInputs.layers`; keys and values were written already.
        """
        keep, new_len = self.attending.memory_len, max(0, new_len - self.attending.ext_len)
        lengths = None if lengths is None else (lengths - self.attending.ext_len).clamp(min=0)
        if isinstance(self.memory, KeyValueCache):
            return replace(self, memory=self.memory.after(new_len, lengths, keep))
        return replace(self, memory=self.memory.after(inputs, new_len, lengths, keep))

    def reset(self, lanes: Bool[Tensor, " lanes"]) -> XLState:
        """Return the memory of the lanes marked True to its beginning: empty, or zeros (see `Attending`).

        Raises: ShapeError: the number of marks differs from the number of lanes.
        """
        check_marks(lanes, self.lanes)
        lanes = lanes.to(self.memory.device)
        if self.attending.initial_memory == "empty":
            return replace(self, memory=self.memory.reset(lanes))
        memory = self.memory.each(lambda x: x.masked_fill(lanes.view(-1, *[1] * (x.dim() - 1)), 0))
        lengths = memory.lengths
        if lengths is None:
            return replace(self, memory=memory)
        return replace(self, memory=replace(memory, lengths=lengths.masked_fill(lanes, self.columns)))

    def reorder(self, rows: Int[Tensor, "*rows"]) -> XLState:
        """Return the lanes with these ids, in this order; see `protocols.SearchState.reorder`."""
        return replace(self, memory=self.memory.reorder(rows.flatten()))


@register_state
@dataclass(frozen=True)
class LayerInputs:
    """The input of every layer at the positions before the segment (Dai et al. 2019, sec. 3.2), without gradient.

    A model that was trained without memory knows only positions within a segment. To generate, it keeps the input of
    the embedding in place of the layers', which is the token ids, and reads them again with every new token (Al-Rfou et
    al. 2019; Dai et al. 2019, sec. 3.1, say what it costs).

    Shape: layers: one (lanes, columns, d_model) per layer, or a single (lanes, columns) of token ids; lengths (lanes,)
        int64: valid positions.
    """

    layers: tuple[Tensor, ...]
    lengths: Tensor

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def columns(self) -> int:
        return self.layers[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def are_tokens(self) -> bool:
        return self.layers[0].dim() == 2

    def row_lengths(self) -> Int[Tensor, " lanes"]:
        return self.lengths

    def valid(self) -> Bool[Tensor, "lanes columns"] | None:
        return valid_columns(self.lengths, self.columns)

    def after(self, inputs: Sequence[Tensor], new_len: int, lengths: Tensor | None, keep: int) -> LayerInputs:
        """Return the newest `keep` positions of this memory followed by the inputs.

        Args: new_len: of the inputs; later positions are ignored. lengths: real ones in each lane; None: all.
        """
        columns = min(self.columns + new_len, keep)
        first, rows = self.columns + new_len - columns, None
        if lengths is not None:
            # Column j of the new memory is this one of the old memory followed by the segment.
            rows = torch.arange(columns, device=lengths.device)
            rows = (rows + (self.columns + lengths - columns)[:, None]).clamp(min=0)
        pairs = [(old.to(new.dtype), new.detach()) for old, new in zip(self.layers, inputs, strict=True)]
        if rows is not None and policy.saves_launches(self.device):
            layers = _kept_together(pairs, rows)
        else:
            layers = [_kept(old, new, first, columns, rows) for old, new in pairs]
        added = new_len if lengths is None else lengths
        return LayerInputs(tuple(layers), (self.lengths + added).clamp(max=columns))

    def recent(self, columns: int) -> LayerInputs:
        """Return the newest columns, as views."""
        newest = self.each(lambda layer: layer[:, layer.shape[1] - columns :])
        return replace(newest, lengths=self.lengths.clamp(max=columns))

    def reset(self, lanes: Bool[Tensor, " lanes"]) -> LayerInputs:
        return replace(self, lengths=self.lengths.masked_fill(lanes, 0))

    def reorder(self, rows: Int[Tensor, " rows"]) -> LayerInputs:
        layers = self.each(lambda layer: layer.index_select(0, rows))
        return replace(layers, lengths=self.lengths.index_select(0, rows))

    def each(self, change: Callable[[Tensor], Tensor]) -> LayerInputs:
        """Return the memory with every layer's inputs changed."""
        return replace(self, layers=tuple(map(change, self.layers)))


def _kept(old: Tensor, new: Tensor, first: int, columns: int, rows: Tensor | None) -> Tensor:
    """Return columns of old and new, concatenated, as a tensor of its own: a view would keep all of both alive."""
    if rows is not None:
        lanes = torch.arange(len(rows), device=rows.device)[:, None]
        return torch.cat([old, new], dim=1)[lanes, rows]
    end = first + columns - old.shape[1]
    if first >= old.shape[1]:
        return new[:, first - old.shape[1] : end].clone(memory_format=torch.contiguous_format)
    return torch.cat([old[:, first:], new[:, :end]], dim=1)


def _kept_together(pairs: Sequence[tuple[Tensor, Tensor]], rows: Tensor) -> Sequence[Tensor]:
    """Compute `_kept` of all layers in two operations. pairs: old and new columns of each layer."""
    both = torch.cat([one for pair in pairs for one in pair], dim=1)
    lanes, columns, *width = both.shape
    both = both.view(lanes, len(pairs), columns // len(pairs), *width)
    layers: Sequence[Tensor] = both[torch.arange(len(rows), device=rows.device)[:, None], :, rows].unbind(2)
    return layers


@dataclass(frozen=True)
class XLStep:
    """The arguments of `TransformerXL.compute_step`; see `protocols.PreparesSteps`.

    One program serves all steps if no number is 0 or 1 and no view is a whole buffer. So there are two distances more
    than needed, as there are free slots in a `KeyValueCache`.

    Shape: tokens (lanes, new_len) ids; layers: with space for the new positions; positions, distance_biases: as in
        `XLState`; seen (1 or lanes, 1, new_len, columns + new_len) bool: the positions that each new one may attend to,
        at least itself; None: one new position sees all.
    """

    tokens: Tensor
    layers: tuple[CacheStep, ...]
    positions: tuple[Tensor, ...]
    distance_biases: tuple[Tensor, ...]
    seen: Tensor | None
    can_compile: bool

    @property
    def kind(self) -> tuple[object, ...]:
        return self.layers[0].key.dtype, len(self.tokens) == 1

    def for_compiler(self) -> XLStep:
        slots = self.layers[0].slots
        everything = self.tokens.new_ones(1, 1, 1, slots.end - slots.first, dtype=torch.bool)
        seen = (everything if self.seen is None else self.seen).expand(len(self.tokens), -1, -1, -1).contiguous()
        # A compiler distinguishes tensors created in inference mode from others; a copy is created in it.
        return replace(self, tokens=self.tokens.clone(), seen=seen)

    def distances(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return projected distances, (heads, k_len, head_dim), and their own scores, (heads, k_len), or None."""
        positions, biases, slots = self.positions[layer], self.distance_biases, self.layers[layer].slots
        columns = slice(positions.shape[1] - (slots.end - slots.first), None)
        return positions[:, columns], biases[layer][:, columns] if biases else None


def _flatten(state: XLState) -> tuple[list[Any], Any]:
    return [state.memory, state.positions, state.distance_biases], astuple(state.attending)


def _unflatten(values: Any, context: Any) -> XLState:
    """The context settings are part of the structure: they are not tensors."""
    names = (field.name for field in fields(Attending))
    memory, positions, biases = values
    return XLState(memory, Attending(**dict(zip(names, context, strict=True))), positions, biases)


pytree.register_pytree_node(
    XLState, _flatten, _unflatten, serialized_type_name=f"{XLState.__module__}.{XLState.__qualname__}"
)
