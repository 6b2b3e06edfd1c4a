"""The input of a model: token ids, lengths and labels, never masks. Models need it: it imports little but torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from manyheads.errors import ShapeError


class RowBatch:
    """The common part of batches: their tensors have an axis of rows."""

    def _with(self, change: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[type-var]

    def rows(self, which: slice) -> Self:
        """Return some of the rows, with the same padding."""
        return self._with(lambda tensor: tensor[which])

    def to(self, device: torch.device | str) -> Self:
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """Return a copy in memory from which a GPU copies by itself; the copy of `to` then does not wait."""
        return self._with(Tensor.pin_memory)


@dataclass(frozen=True)
class PairBatch(RowBatch):
    """Aligned sentence pairs as ids, padded on the right.

    Shape: source (batch, source_len), each row tokens + EOS; target (batch, target_len), each row BOS + tokens + EOS;
        lengths (batch,), without padding; sample_ids (batch,), positions in the store. pad_id: the id of padding.
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor
    sample_ids: Tensor
    pad_id: int = 0

    @classmethod
    def of(cls, source: Tensor, target: Tensor, pad_id: int = 0) -> Self:
        """Return the batch of ids alone; `pad_id` at the end of a row is padding. source, target: as above.

        Raises: ShapeError: they are no matrices of whole numbers, or have different numbers of rows.
        """
        _check_ids(source, "source", 1)
        _check_ids(target, "target", 2)
        if len(source) != len(target):
            raise ShapeError(f"source has {len(source)} rows and target {len(target)}; each source needs one target.")
        lengths = [
            ((ids != pad_id) * torch.arange(1, ids.shape[1] + 1, device=ids.device)).amax(1) for ids in (source, target)
        ]
        return cls(source, lengths[0], target, lengths[1], torch.arange(len(source)), pad_id)

    @property
    def target_input(self) -> Tensor:
        """The decoder's input: the target without its last column. (batch, target_len - 1)"""
        return self.target[:, :-1]

    @property
    def target_labels(self) -> Tensor:
        """The decoder's targets: the tokens and EOS. (batch, target_len - 1)"""
        return self.target[:, 1:]

    @property
    def size(self) -> int:
        """Number of ids of the larger side, including padding."""
        return max(self.source.numel(), self.target.numel())

    def describe(self) -> str:
        """Return the shape in words."""
        rows, source_len = self.source.shape
        return f"{rows} rows of {source_len} source and {self.target.shape[1]} target tokens"

    def num_target_tokens(self) -> int:
        """Return the number of labels that count in the loss: real target tokens and EOS, without BOS and padding."""
        return int(self.target_lengths.sum()) - self.target_lengths.numel()


@dataclass(frozen=True)
class PackedShape:
    """The sizes of packed batches, which are the same in all steps of a run on one rank.

    Attributes:
        source_slots, target_slots: tokens of each side, with filler; of the targets without their last token.
        most_pairs: number of pairs at most.
        longest: tokens of a sentence at most.
    """

    source_slots: int
    target_slots: int
    most_pairs: int
    longest: int

    @property
    def num_fillers(self) -> int:
        """Sentences of filler: as many as can fill a side without one that is longer than `longest`."""
        return -(-max(self.source_slots, self.target_slots) // self.longest)

    @classmethod
    def around(cls, source: Tensor, target: Tensor, longest: int) -> Self:
        """Return the shape for sentences of these lengths, rounded up to multiples of 64. longest: at least 2."""
        totals = int(source.sum()), int(target.sum())
        larger = _up((max(totals) + 1) * longest / (longest - 1))  # so that each filler has a token
        source_slots, target_slots = (_up(total - (-larger // longest)) for total in totals)
        return cls(source_slots, target_slots, len(source), longest)

    def describe(self) -> str:
        """Return the sizes in words."""
        return (
            f"{self.source_slots:,} source and {self.target_slots:,} target slots for up to {self.most_pairs:,} pairs"
            f" of up to {self.longest:,} tokens"
        )


def _up(size: float) -> int:
    return math.ceil(size / 64) * 64


@dataclass(frozen=True)
class PackedBatch(RowBatch):
    """Sentence pairs one after the other in one row for each side, without padding between them.

    Pairs are segments, with the same number on both sides. So are the fillers behind them, which fill the slots: no
    kernel leaves a row of theirs unwritten. The other segments are empty.

    Shape: source (1, source_slots); target_input, target_labels and keep (1, target_slots): the decoder's input, the
        token after each, and whether it counts; *_starts (segments + 1,) int32, where each begins, and the end of the
        last; *_places (slots,) position of each token in its sentence. longest: see `PackedShape`. pairs: the same
        pairs, padded, not moved by `to`.
    """

    source: Tensor
    source_starts: Tensor
    source_places: Tensor
    target_input: Tensor
    target_labels: Tensor
    target_starts: Tensor
    target_places: Tensor
    keep: Tensor
    longest: int
    pairs: PairBatch

    @classmethod
    def of(cls, pairs: PairBatch, shape: PackedShape | None = None) -> PackedBatch:
        """Pack pairs, which are on the CPU. shape: None: as small as they allow.

        Raises: ShapeError: they do not fit into the shape.
        """
        source_lengths, target_lengths = pairs.source_lengths, (pairs.target_lengths - 1).clamp(min=0)
        most = max(2, int(source_lengths.max()), int(target_lengths.max()))
        shape = shape or PackedShape.around(source_lengths, target_lengths, most)
        totals, rest = (int(source_lengths.sum()), int(target_lengths.sum())), shape.num_fillers
        if (
            most > shape.longest
            or len(pairs.sample_ids) > shape.most_pairs
            or totals[0] + rest > shape.source_slots
            or totals[1] + rest > shape.target_slots
        ):
            raise ShapeError(
                f"{len(pairs.sample_ids)} pairs with {totals[0]} source and {totals[1]} target tokens, the longest of"
                f" {most}, do not fit into a packed batch with {shape.describe()}, of which {rest} slots on each side"
                " are for filler; give fewer or shorter pairs, or a larger shape."
            )
        rows = [pairs.target_input, pairs.target_labels]
        (source,), starts, places = _packed([pairs.source], source_lengths, shape.source_slots, shape, pairs.pad_id)
        (ids, labels), *of_target = _packed(rows, target_lengths, shape.target_slots, shape, pairs.pad_id)
        keep = (torch.arange(shape.target_slots) < totals[1])[None]
        return cls(source, starts, places, ids, labels, of_target[0], of_target[1], keep, shape.longest, pairs)

    @property
    def sample_ids(self) -> Tensor:
        """See `PairBatch`."""
        return self.pairs.sample_ids

    @property
    def pad_id(self) -> int:
        return self.pairs.pad_id

    @property
    def size(self) -> int:
        """Number of ids of the larger side, including filler."""
        return max(self.source.numel(), self.target_input.numel())

    def rows(self, which: slice) -> PackedBatch:
        """Return some of the pairs, in a shape that is as small as they allow."""
        pairs = self.pairs.rows(which)
        shape = PackedShape.around(pairs.source_lengths, pairs.target_lengths - 1, self.longest)
        return PackedBatch.of(pairs, shape)

    def describe(self) -> str:
        """Return the shape in words."""
        slots = f"{self.source.numel()} source and {self.target_input.numel()} target slots"
        return f"{len(self.sample_ids)} pairs packed into {slots}"

    def num_target_tokens(self) -> int:
        """See `PairBatch.num_target_tokens`."""
        return self.pairs.num_target_tokens()


def _packed(
    rows: list[Tensor], lengths: Tensor, slots: int, shape: PackedShape, pad_id: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the first `lengths` ids of rows one after the other, (1, slots) each, and starts and places."""
    total, fillers = int(lengths.sum()), torch.arange(shape.num_fillers)
    size, more = divmod(slots - total, shape.num_fillers)
    sizes = torch.cat([lengths, size + (fillers < more).long(), lengths.new_zeros(shape.most_pairs - len(lengths))])
    ends = sizes.cumsum(0)
    real = torch.arange(rows[0].shape[1]) < lengths[:, None]
    filler = torch.full((slots - total,), pad_id)
    ids = [torch.cat([one[real], filler])[None] for one in rows]
    places = torch.arange(slots) - (ends - sizes).repeat_interleave(sizes)
    return ids, torch.cat([ends.new_zeros(1), ends]).int(), places


@dataclass(frozen=True)
class SegmentBatch(RowBatch):
    """One segment of each lane.

    Shape: tokens (lanes, length) ids that the model reads, padded on the right with 0; targets (lanes, length) the
        token after each; lengths (lanes,) number of real tokens of each row, including context; resets (lanes,) bool:
        clear the lane's memory before this segment; sample_ids (lanes,) position in the store where the row begins.
        The first `num_context` tokens of each row are read again (`ext_len`), so their targets do not count.
        first_positions (lanes,) position of each row's first token in the model's table of positions; None: all 0.
        memory_len: number of positions in memory that the row attends to; None: all.
    """

    tokens: Tensor
    targets: Tensor
    lengths: Tensor
    resets: Tensor
    sample_ids: Tensor
    num_context: int = 0
    first_positions: Tensor | None = None
    memory_len: int | None = None

    @classmethod
    def of(cls, ids: Tensor) -> Self:
        """Return the segment in which each id but the last is read, and the next one predicted. ids: (lanes, length).

        Raises: ShapeError: they are no matrix of whole numbers, or have fewer than two columns.
        """
        _check_ids(ids, "ids", 2)
        rows = torch.arange(len(ids), device=ids.device)
        lengths = torch.full_like(rows, ids.shape[1] - 1)
        return cls(ids[:, :-1], ids[:, 1:], lengths, torch.zeros_like(rows, dtype=torch.bool), rows)

    def num_target_tokens(self) -> int:
        """Return the number of targets that count in the loss."""
        return int((self.lengths - self.num_context).clamp(min=0).sum())

    @property
    def size(self) -> int:
        """Number of ids, including padding."""
        return self.tokens.numel()

    def describe(self) -> str:
        """Return the shape in words."""
        lanes, length = self.tokens.shape
        return f"{lanes} lanes of {length} tokens"

    def split(self, parts: int) -> list[SegmentBatch]:
        """Return contiguous groups of lanes, at most one per lane, whose sizes differ by at most one."""
        lanes = len(self.lengths)
        parts = min(parts, lanes)
        return [self.rows(share(lanes, part, parts)) for part in range(parts)]


def _check_ids(ids: Tensor, name: str, fewest: int) -> None:
    if ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] < fewest:
        raise ShapeError(
            f"{name} has shape {tuple(ids.shape)} of {ids.dtype}; ids are whole numbers, (rows, at least {fewest})."
        )


def share(count: int, part: int, parts: int) -> slice:
    """Return the positions of share `part` of `parts` in `count` items: sizes differ by one at most, larger first.

    >>> [share(5, part, 3) for part in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size, more = divmod(count, parts)
    first = part * size + min(part, more)
    return slice(first, first + size + (part < more))
