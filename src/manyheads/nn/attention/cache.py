"""The cache of generation: keys and values of earlier positions, as a value that a call takes and returns.

A step has two parts. `KeyValueCache.prepare` selects slots for the new positions and allocates space, once for all
layers, in Python, depending on values. The rest projects, writes and attends. It makes no decisions, so it can be
compiled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.nn.attention.masks import KeyPadding, Lengths, Mask, NeverEmpty, dense_mask
from manyheads.nn.kernels import modes, policy
from manyheads.nn.pytrees import State, register_state

if TYPE_CHECKING:
    from manyheads.nn.shapes import Bool, Float, Int

# Slots that stay free before the first position and behind the last: a compiler makes separate programs for 0, for 1,
# and for views of a whole buffer.
_FREE = 2
# The largest number of hypotheses of a sentence whose keys are kept together: each is compared with the keys of all.
_MOST_TOGETHER = 8


@dataclass(frozen=True)
class Slots:
    """The slots of a step, the same in every layer.

    They are Python integers, so that compiled code does not have to read tensors.

    length: keys of each row before the step. first: slot of the oldest key. start, end: range of the new slots. seen:
    the slots from `first` on that each row of a group sees, (groups, 1, branches, end - first) bool; None: each row is
    a group of its own and sees all slots. padding: the keys that rows of different lengths have; None: all.
    """

    length: int
    first: int
    start: int
    end: int
    seen: Tensor | None = None
    padding: KeyPadding | None = None


@dataclass(frozen=True)
class CacheStep:
    """The cache of one layer during one step: the slots of the new keys are known, but not the keys.

        >>> cache = KeyValueCache.empty(rows=2, num_heads=4, head_dim=8, like=torch.zeros(1))
        >>> (step,), cache = cache.prepare(new_len=3)
        >>> keys, values = step.write(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8)).filled()
        >>> keys.shape, int(cache.after(3).length)
        (torch.Size([2, 4, 3, 8]), 3)

    Shape: key, value (groups, heads, capacity, head_dim), shared with the cache after the step.
    """

    key: Tensor
    value: Tensor
    slots: Slots

    @property
    def length(self) -> int:
        """Keys of each row before the step; the first new query has this place among the keys."""
        return self.slots.length

    def write(self, key: Tensor, value: Tensor) -> CacheStep:
        """Write the new positions. key, value: (rows, heads, new_len, head_dim)."""
        buffers, new = _side_by_side(self.key, self.value), _side_by_side(key, value)
        if buffers is not None and new is not None:  # one copy instead of two
            buffers[..., self.slots.start : self.slots.end, :] = _by_group(new, self.slots)
            return self
        _write(self.key, key, self.slots)
        _write(self.value, value, self.slots)
        return self

    def among_real(self, mask: Mask | None) -> Mask | None:
        """Return the mask without the keys that a row lacks because others are longer."""
        return mask if self.slots.padding is None else self.slots.padding & mask

    def shared(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return keys and values of each group, and `Slots.seen`; None if no rows share slots.

        Shape: (groups, heads, slots, head_dim) each, and (groups, 1, branches, slots).
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
        filled = slice(self.slots.first, self.slots.end)
        return self.key[:, :, filled], self.value[:, :, filled]


def _write(buffer: Tensor, new: Tensor, slots: Slots) -> None:
    buffer[:, :, slots.start : slots.end] = _by_group(new, slots)


def _by_group(new: Tensor, slots: Slots) -> Tensor:
    """(*any, rows, heads, new_len, head_dim) -> (*any, groups, heads, branches x new_len, head_dim)"""
    branches = 1 if slots.seen is None else slots.seen.shape[2]
    *before, rows, heads, new_len, head_dim = new.shape
    return new.reshape(*before, rows // branches, branches, heads, new_len, head_dim).transpose(-4, -3).flatten(-3, -2)


def _side_by_side(key: Tensor, value: Tensor) -> Tensor | None:
    """Return both as one tensor, (2, *shape), if they lie in one memory and launches count; otherwise None."""
    if modes.is_compiled() or not policy.saves_launches(key.device) or torch.is_grad_enabled():
        return None
    distance = value.storage_offset() - key.storage_offset()
    if not _are_alike(key, value) or distance <= 0 or key.untyped_storage()._cdata != value.untyped_storage()._cdata:
        return None
    return key.as_strided((2, *key.shape), (distance, *key.stride()))


def _are_alike(key: Tensor, value: Tensor) -> bool:
    return (key.shape, key.stride(), key.dtype) == (value.shape, value.stride(), value.dtype)


@register_state
@dataclass(frozen=True)
class KeyValueCache(State):
    """Projected keys and values of the positions that each row has read, in one layer or several.

        >>> cache = KeyValueCache.empty(rows=2, num_heads=4, head_dim=8, like=torch.zeros(1))
        >>> cache = cache.append(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8), lengths=torch.tensor([3, 1]))
        >>> cache.filled()[0].shape, cache.valid().tolist()
        (torch.Size([2, 4, 3, 8]), [[True, True, True], [False, False, True]])
        >>> cache.reorder(torch.tensor([1, 1, 0])).row_lengths().tolist()
        [1, 1, 3]

    Rows are aligned on the right: the newest position of every row is in slot `last` - 1, so that all rows write their
    next positions in one slice, and a distance is the same number of slots in every row. A call consumes the cache that
    it receives, because new positions are written into its buffers; `clone()` to branch.

    The rows of a beam search may share the slots of a sentence (its group): a key is stored once, and `seen` says which
    slots are the past of which row. When a search continues from other rows, only this table is copied, and no key; all
    rows of a group query its keys as one longer query. Slots that no row sees any more are removed when the buffer is
    full. Such rows have equal lengths.

    Shape: keys, values: one (groups, heads, capacity, head_dim) per layer, of which slots `first` to `last` are in use;
        layers, and keys and values, may differ in heads and head_dim, and heads be fewer than those of the queries;
        first, last, length () int64 on the CPU; length: positions of a row, or, with lengths, at least those of the
        longest; lengths (rows,) int64; None: all rows are equally long; seen (groups, branches, capacity - first) bool;
        None: each row is a group.
    Cost: appending copies a position a constant number of times, for a sequence of any length.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    first: Tensor
    last: Tensor
    length: Tensor
    lengths: Tensor | None = None
    seen: Tensor | None = None

    @classmethod
    def of(cls, keys: Iterable[Tensor], values: Iterable[Tensor]) -> KeyValueCache:
        """Return a cache with these positions in each layer: (rows, heads, length, head_dim) each."""
        keys = tuple(keys)
        first, last, length = (torch.tensor(x, device="cpu") for x in (0, keys[0].shape[2], keys[0].shape[2]))
        return cls(keys, tuple(values), first, last, length)

    @classmethod
    def empty(
        cls, rows: int, num_heads: int, head_dim: int, like: Tensor, *, value_dim: int | None = None
    ) -> KeyValueCache:
        """Return a cache of one layer without positions; device and dtype of `like`.

        Args: num_heads: of keys and values; value_dim: width of a value; None: head_dim.
        """
        widths = (head_dim, head_dim if value_dim is None else value_dim)
        key, value = (like.new_empty(rows, num_heads, 0, width) for width in widths)
        return cls.of([key], [value])

    @classmethod
    def of_layers(cls, layers: Sequence[KeyValueCache]) -> KeyValueCache:
        """Return one cache of several with the same rows and lengths."""
        keys = tuple(key for cache in layers for key in cache.keys)
        return replace(layers[0], keys=keys, values=tuple(value for cache in layers for value in cache.values))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.keys[0].shape[0] * self._branches

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def columns(self) -> int:
        """Number of slots in use."""
        return int(self.last) - int(self.first)

    @property
    def _branches(self) -> int:
        return 1 if self.seen is None else self.seen.shape[1]

    def row_lengths(self) -> Int[Tensor, " rows"]:
        """Return the number of positions that each row has read."""
        if self.lengths is not None:
            return self.lengths
        return torch.full((self.rows,), int(self.length), dtype=torch.int64, device=self.device)

    def valid(self) -> Bool[Tensor, "rows columns"] | None:
        """Return which slots in use hold a position of the row; None: all (not checked where a device would wait)."""
        return None if self.lengths is None else valid_columns(self.lengths, self.columns)

    def append(
        self,
        key: Float[Tensor, "rows heads new_len head_dim"],
        value: Float[Tensor, "rows heads new_len value_dim"],
        lengths: Int[Tensor, " rows"] | None = None,
    ) -> KeyValueCache:
        """Return the cache of one layer with new positions after the old ones; see `after`."""
        (step,), cache = self.prepare(key.shape[2], key.dtype)
        step.write(key, value)
        return cache.after(key.shape[2], lengths)

    def prepare(
        self, new_len: int, dtype: torch.dtype | None = None, keep: int | None = None
    ) -> tuple[tuple[CacheStep, ...], KeyValueCache]:
        """Return each layer for a step of new_len positions, and the cache, whose `after` is the one after the step.

        Args:
            dtype: of the new keys and values; None: as the old ones.
            keep: how many positions `after` will keep, so that no more space is taken; None: all.
        """
        dtype, count = dtype or self.keys[0].dtype, self._branches * new_len
        cache = self
        if int(self.last) + count + _FREE > self.keys[0].shape[2] or self.keys[0].dtype != dtype:
            cache = self._with_room(count, dtype, keep) if self.seen is None else self._without_unseen(count, dtype)
        first, start = int(cache.first), int(cache.last)
        length, seen, padding = start - first, None, None
        if cache.seen is not None:
            own = torch.eye(self._branches, dtype=torch.bool, device=cache.seen.device)
            cache.seen[:, :, length : length + count] = own.repeat_interleave(new_len, dim=1)
            length, seen = int(self.length), cache.seen[:, None, :, : length + count]
        elif (valid := cache.valid()) is not None:
            padding = KeyPadding(torch.cat([valid, valid.new_ones(len(valid), new_len)], dim=1))
        slots = Slots(length, first, start, start + count, seen, padding)
        return tuple(CacheStep(key, value, slots) for key, value in zip(cache.keys, cache.values, strict=True)), cache

    def after(
        self, new_len: int, lengths: Int[Tensor, " rows"] | None = None, keep: int | None = None
    ) -> KeyValueCache:
        """Return the cache after a step of new_len positions, which were written.

        Args:
            lengths: how many of them are real in each row, padding on the right; None: all.
            keep: the number of newest positions of a row that are kept, whatever its length; None: all.
        """
        last = self.last + self._branches * new_len
        dropped = 0 if keep is None else max(0, self.columns + new_len - keep)
        cache = replace(
            self,
            first=self.first + dropped,
            last=last,
            length=self.length + new_len,
            lengths=None if self.lengths is None else self.lengths + new_len,
        )
        return cache if lengths is None else cache._forget(new_len - lengths, int(self.first))

    def truncate(self, lengths: int | Int[Tensor, " rows"]) -> KeyValueCache:
        """Return the cache with the first positions of each row alone: this number, or one for each row.

        The newest positions are removed, as after a guess that failed. Rows may not share slots.
        """
        if isinstance(lengths, int) and self.lengths is None:
            removed = max(0, int(self.length) - lengths)
            last = torch.maximum(self.first, self.last - removed)
            return replace(self, last=last, length=self.length - removed)
        return self._forget((self.row_lengths() - lengths).clamp(min=0), int(self.first))

    def _forget(self, newest: Int[Tensor, " rows"], oldest_slot: int) -> KeyValueCache:
        """Return the cache without so many of the newest positions of each row; the others move to the right."""
        assert self.seen is None, "rows that share slots have equal lengths"
        first, last, columns = int(self.first), int(self.last), self.columns
        # Slots before a row's oldest position are masked; they get numbers that are finite.
        slots = (torch.arange(first, last, device=newest.device) - newest[:, None]).clamp(min=oldest_slot)

        def aligned(buffer: Tensor) -> Tensor:
            rows, heads, _, width = buffer.shape
            buffer[:, :, first:last] = buffer.gather(2, slots[:, None, :, None].expand(rows, heads, columns, width))
            return buffer

        return replace(self.each(aligned), lengths=self.row_lengths() - newest)

    def filled(self, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer in order: (rows, heads, columns, head_dim) each; see `CacheStep.filled`."""
        first, last = int(self.first), int(self.last)
        seen = None if self.seen is None else self.seen[:, None, :, : last - first]
        slots = Slots(int(self.length), first, last, last, seen)
        return CacheStep(self.keys[layer], self.values[layer], slots).filled()

    def reset(self, rows: Bool[Tensor, " rows"]) -> KeyValueCache:
        """Forget the positions of the marked rows."""
        lengths = self.row_lengths().masked_fill(rows, 0)
        # Otherwise the buffers would grow with all positions that were ever written.
        longest = int(lengths.max()) if len(lengths) else 0
        first = torch.maximum(self.first, self.last - longest)
        return replace(self, lengths=lengths, length=torch.full_like(self.length, longest), first=first)

    def reorder(self, rows: Tensor, *, together: bool = False) -> KeyValueCache:
        """Return the rows with these ids, in this order.

        Args:
            rows: (new_rows,), or (groups, branches), of which the entries of a line come from one group.
            together: the rows of a line share the slots of their past, as they do already where `seen` is given.
        """
        seen = self.seen
        if seen is None and together and self.lengths is None:
            seen = torch.arange(self.keys[0].shape[2] - int(self.first), device=rows.device) < self.columns
            seen = seen.expand(len(self.keys[0]), 1, -1)
        if seen is None:
            rows = rows.flatten()
            lengths = None if self.lengths is None else self.lengths.index_select(0, rows)
            return replace(self.each(lambda buffer: buffer.index_select(0, rows)), lengths=lengths)
        groups = torch.div(rows[:, 0], seen.shape[1], rounding_mode="floor")
        parents = rows - groups[:, None] * seen.shape[1]
        cache = self
        if len(groups) != len(seen):  # groups keep their order, so an equal number means the same ones
            seen = seen.index_select(0, groups)
            cache = self.each(lambda buffer: buffer.index_select(0, groups))
        return replace(cache, seen=seen.gather(1, parents[:, :, None].expand(-1, -1, seen.shape[2])))

    def each(self, change: Callable[[Tensor], Tensor]) -> KeyValueCache:
        """Return the cache with every buffer of keys or values changed."""
        keys, values = tuple(map(change, self.keys)), tuple(map(change, self.values))
        if policy.saves_launches(self.device) and all(map(_are_alike, keys, values)):
            keys, values = zip(*(torch.stack(pair).unbind() for pair in zip(keys, values, strict=True)), strict=True)
        return replace(self, keys=keys, values=values)

    def _with_room(self, count: int, dtype: torch.dtype, keep: int | None) -> KeyValueCache:
        """Return the same cache with space for `count` slots behind those in use, in buffers of that type.

        A buffer doubles until it holds a quarter more than is kept. Then, its contents move to its front.
        """
        first, last, columns = int(self.first), int(self.last), self.columns
        needed = _FREE + columns + count + _FREE
        capacity = needed + max(16, columns)
        if keep is not None:
            capacity = max(needed + max(16, columns // 4), min(capacity, 2 * _FREE + count + keep + keep // 4))
        end = _FREE + columns

        def moved(buffer: Tensor) -> Tensor:
            if buffer.dtype == dtype and buffer.shape[2] >= needed + max(16, columns // 4):
                buffer[:, :, _FREE:end] = buffer[:, :, first:last].clone()  # the two may overlap
                return buffer
            grown = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3], dtype=dtype)
            grown[:, :, _FREE:end] = buffer[:, :, first:last]
            return grown

        return self._moved(moved, end)

    def _without_unseen(self, count: int, dtype: torch.dtype) -> KeyValueCache:
        """Return the same cache with the slots that some row sees, in order, and space for `count` more and as many."""
        assert self.seen is not None
        seen, first = self.seen[:, :, : self.columns], int(self.first)
        alive = seen.any(dim=1)
        kept = int(alive.sum(dim=1).max()) if alive.numel() else 0
        order = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :kept]  # (groups, kept)
        capacity = max(2 * (kept + count), 16 * seen.shape[1]) + _FREE
        table = seen.new_zeros(*seen.shape[:2], capacity)
        table[:, :, :kept] = seen.gather(2, order[:, None].expand(-1, seen.shape[1], -1))

        def moved(buffer: Tensor) -> Tensor:
            groups, heads, slots, head_dim = buffer.shape
            grown = buffer.new_empty(groups, heads, _FREE + capacity, head_dim, dtype=dtype)
            # Copy whole rows of memory by their number: gather would look up every single entry.
            starts = slots * torch.arange(groups * heads, device=buffer.device).view(groups, heads, 1)
            rows = buffer.reshape(-1, head_dim).index_select(0, (starts + first + order[:, None]).flatten())
            grown[:, :, _FREE : _FREE + kept] = rows.view(groups, heads, kept, head_dim)  # heads can be 0
            return grown

        return replace(self._moved(moved, _FREE + kept), seen=table)

    def _moved(self, change: Callable[[Tensor], Tensor], end: int) -> KeyValueCache:
        first, last = torch.full_like(self.first, _FREE), torch.full_like(self.last, end)
        return replace(self.each(change), first=first, last=last)


def valid_columns(lengths: Int[Tensor, " rows"], columns: int) -> Bool[Tensor, "rows columns"] | None:
    """Return the last `lengths` columns of each row; None: all (not checked where a device would wait)."""
    if not columns or (policy.can_look(lengths) and bool((lengths >= columns).all())):
        return None
    return torch.arange(columns, device=lengths.device) >= (columns - lengths)[:, None]


@dataclass(frozen=True)
class DecoderLayerStep:
    """One decoder layer during one step: its own keys, and those of the source, (sentences, heads, source_len, ...)."""

    past: CacheStep
    source_key: Tensor
    source_value: Tensor


@register_state
@dataclass(frozen=True)
class DecoderState(State):
    """The state of a decoder between two steps of a search; rows are sentences x beams, sentence by sentence.

    Shape: past: caches of the target positions, one for all layers or one for each; source: keys and values of the
        encoder's output, one row per sentence, for any number of beams; length () int64 on the CPU: number of target
        positions so far; source_seen (sentences, 1, 1, source_len) bool: False at the source's padding, None if there
        is none. The values of a source without tokens are zero, and all of them are seen: no step looks for such rows.
    """

    past: tuple[Any, ...]
    source: KeyValueCache
    length: Tensor
    source_seen: Tensor | None = None

    @classmethod
    def begin(
        cls, past: Iterable[Any], source: Iterable[tuple[Tensor, Tensor]], source_seen: Tensor | None = None
    ) -> DecoderState:
        """Return the state before the first target position. source: projected keys and values of each layer."""
        keys, values = zip(*source, strict=True)
        if source_seen is not None:
            some = source_seen.any(dim=-1, keepdim=True)
            if not (policy.has_values(some) and bool(some.all())):
                source_seen = source_seen | ~some
                values = tuple(value * some.to(value.dtype) for value in values)
        cache = KeyValueCache.of((key.contiguous() for key in keys), (value.contiguous() for value in values))
        return cls(tuple(past), cache, torch.zeros((), dtype=torch.int64, device="cpu"), source_seen)

    @property
    def memory_mask(self) -> Mask | None:
        return None if self.source_seen is None else NeverEmpty(self.source_seen)

    def reorder(self, rows: Tensor) -> DecoderState:
        """See `protocols.SearchState.reorder`. rows: (sentences, beams) of old row ids."""
        old_sentences, source, seen = self.source.rows, self.source, self.source_seen
        old_beams = max(1, self.past[0].rows // max(1, old_sentences))
        # As soon as a sentence has several hypotheses, their keys are kept together.
        together = old_beams == 1 < rows.shape[1] <= _MOST_TOGETHER
        if rows.shape[0] != old_sentences:  # sentences keep their order: an equal number means the same ones
            sentences = torch.div(rows[:, 0], old_beams, rounding_mode="floor")
            source, seen = source.reorder(sentences), None if seen is None else seen.index_select(0, sentences)
        past = tuple(cache.reorder(rows, together=together) for cache in self.past)
        return DecoderState(past, source, self.length, seen)

    def prepare(self, new_len: int) -> tuple[tuple[DecoderLayerStep, ...], DecoderState]:
        """Return the layers for a step of new_len positions, and the state after it; for one cache of all layers."""
        (past,) = cast(tuple[KeyValueCache], self.past)
        steps, past = past.prepare(new_len)
        layers = map(DecoderLayerStep, steps, self.source.keys, self.source.values)
        return tuple(layers), replace(self, past=(past.after(new_len),), length=self.length + new_len)

    def clone(self) -> DecoderState:
        """Return a copy for branching: steps of one do not change the other."""
        return replace(self, past=pytree.tree_map(torch.clone, self.past))


def source_mask(source_lengths: Tensor, source_len: int) -> Tensor | None:
    """Return `DecoderState.source_seen` for sources of these lengths."""
    seen = dense_mask(Lengths(source_lengths), 1, source_len, source_lengths.device)
    assert seen is not None
    # A mask costs time in every later step.
    return None if policy.has_values(seen) and bool(seen.all()) else seen
