"""Chunks of hashed attention: the keys that a chunk of queries sees, and the weight of each pair.

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2, fig. 2. `kernels.lsh` multiplies these chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.dropout import scaled_mask

if TYPE_CHECKING:
    from manyheads.nn.attention.settings import LSHSettings

SAFE_SCORE = 60.0
"""Up to this bound softmax needs no shift: exp(60), exp(-60) and sums of thousands of them are within the range of
float32 and bfloat16."""
# Marks a slot without a position; it is later than all positions.
_NO_POSITION = 1 << 30


@dataclass(frozen=True)
class Layout:
    """The sorted order of each round; rows are batch x heads.

    Shape: order (rows, rounds, slots): the position in each slot, or `length` if there is none; buckets (rows, rounds,
        slots): numbers in the order of the buckets; ranks (rows, rounds, length): the slot of each position;
        real (rows, length): False for padding, or an empty tensor without padding.
    """

    order: Tensor
    buckets: Tensor
    ranks: Tensor
    real: Tensor

    @classmethod
    def of(cls, order: Tensor, length: int, lengths: Tensor | None) -> Layout:
        """Args: order: of `kernels.lsh.sorting_order`; length: of the sequence; lengths: of its rows, or None."""
        heads = order.shape[1]
        order = order.flatten(0, 1)
        positions = (order >> 1).clamp(max=length)
        real = torch.empty(0, dtype=torch.bool, device=order.device)
        if lengths is not None:
            each = lengths.repeat_interleave(heads)
            real = torch.arange(length, device=order.device) < each[:, None]
            positions = positions.masked_fill(positions >= each[:, None, None], length)
        buckets = (order & 1).cumsum(-1, dtype=torch.int32)
        return cls(positions, buckets, ranks_of(order, length).int(), real)


def ranks_of(order: Tensor, length: int) -> Tensor:
    """Return the slot of each position, (..., length) int64, for an order of `kernels.lsh.sorting_order`."""
    numbers = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(numbers).scatter(-1, (order >> 1).long(), numbers)[..., :length]


class SortedRows(ABC):
    """Some rows in sorted order. The chunks of all rows and rounds form one list; a tile is a slice of this list.

    Tensors "by chunk" are (chunks + 1, chunk_len): the last chunk is empty. Tables are (rows x length + 1, width): the
    last row is zero and represents slots without a position. Each query chunk has `num_offsets` key chunks.
    """

    num_offsets: int
    num_code_columns = 0
    """Columns of the tables of queries and keys that `operands` fills."""

    def __init__(
        self, settings: LSHSettings, layout: Layout, rows: slice, dtype: torch.dtype, rate: float, seed: int
    ) -> None:
        self.settings, self.layout, self.rows, self.dtype = settings, layout, rows, dtype
        self.rate, self.seed, self.chunk_len = rate, seed, settings.chunk_len
        order = layout.order[rows]
        self.num_rows, self.rounds, self.num_slots = order.shape
        self.length = layout.ranks.shape[2]
        self.num_chunks = self.num_rows * self.rounds * self.num_slots // self.chunk_len
        first = torch.arange(self.num_rows, device=order.device, dtype=torch.int32)[:, None, None] * self.length
        no_row = self.num_rows * self.length
        self.index = self._by_chunk((order + first).masked_fill(order >= self.length, no_row), no_row)
        self._scratch: dict[str, Tensor] = {}

    @abstractmethod
    def take_keys(self, table: Tensor, tile: slice) -> list[Tensor]:
        """Return the rows of a table at the key chunks of a tile: (chunks, chunk_len, width) for each offset."""

    @abstractmethod
    def counts(self, tile: slice) -> Tensor:
        """Return the factor of each pair in the shape of `scores`; 0 if the query does not see the key."""

    @abstractmethod
    def key_sums(self, width: int) -> Tensor:
        """Return a buffer for sums by key chunk, (chunks + 1, chunk_len, width), for `add_to_keys`."""

    @abstractmethod
    def add_to_keys(self, sums: Tensor, tile: slice, left: Tensor, right: Tensor) -> None:
        """Add left^T right of the query chunks of a tile to the sums of their key chunks. Call it in order of tiles.

        Shape: left (offsets, chunks, chunk_len, chunk_len), right (chunks, chunk_len, width).
        """

    def tiles(self) -> Iterator[slice]:
        """Yield slices of chunks to process at once."""
        step = policy.lsh_chunks_at_once(self.chunk_len**2 * self.num_offsets, self.index.device)
        return (slice(first, min(first + step, self.num_chunks)) for first in range(0, self.num_chunks, step))

    def take(self, table: Tensor, tile: slice) -> Tensor:
        """Return the rows of a table at the query chunks of a tile: (chunks, chunk_len, width)."""
        return _rows_at(table, self.index[tile])

    def operands(self, tile: slice, queries: Tensor, keys: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the query chunks, and the key chunks of each offset, from their tables."""
        return self.take(queries, tile), self.take_keys(keys, tile)

    def scores(self, q: Tensor, keys: list[Tensor]) -> Tensor:
        """Return q k^T of `operands` in the scratch memory: (offsets, chunks, chunk_len, chunk_len)."""
        scores = self.scratch("scores", len(q))
        for one, key in zip(scores, keys, strict=True):
            torch.bmm(q, key.transpose(1, 2), out=one)
        return scores

    def weights(self, tile: slice, q: Tensor, keys: list[Tensor]) -> Tensor:
        """Return exp(scores) x `counts`, in the memory of the scores."""
        # A hidden score may be far above the visible ones. Its exp must stay finite, so that 0 x exp is 0.
        return self.scores(q, keys).clamp_(max=SAFE_SCORE).exp_().mul_(self.counts(tile))

    def scratch(self, name: str, num_chunks: int) -> Tensor:
        """Return memory for a tile of scores, the same for all tiles: fresh memory costs more than the computation."""
        found = self._scratch.get(name)
        if found is None or found.shape[1] != num_chunks:
            shape = (self.num_offsets, num_chunks, self.chunk_len, self.chunk_len)
            found = torch.empty(shape, dtype=self.dtype, device=self.index.device)
            self._scratch[name] = found
        return found

    def dropout_mask(self, tile: slice, like: Tensor) -> Tensor | None:
        """Return the dropout mask of a tile's weights, the same at every call; None without dropout."""
        if not self.rate:
            return None
        number = self.seed + self.rows.start * 1_000_003 + tile.start
        return scaled_mask(like, self.rate, torch.Generator(like.device).manual_seed(number % (1 << 63)))

    def zero_padding(self, x: Tensor) -> Tensor:
        """Return x (rows, length, width) with zeros at padding."""
        real = self.layout.real
        return x * real[self.rows][..., None].to(x.dtype) if real.numel() else x

    def sum_rounds(self, x: Tensor) -> Tensor:
        """Sum over the rounds for each position: (chunks, chunk_len, width) -> (rows x length, width)."""
        where = self._slots_of_positions
        # Both variants add at least in float32 and round once. Of `embedding_bag` torch has a first derivative only.
        if modes.is_fast() and policy.has_embedding_bag(x.device):
            return F.embedding_bag(where, x.flatten(0, 1), mode="sum")
        return x.flatten(0, 1).index_select(0, where.flatten()).view(*where.shape, -1).sum(1)

    @cached_property
    def _slots_of_positions(self) -> Tensor:
        """Slots in the list of chunks, int32: (rows x length, rounds)."""
        by_row = self._ranks_in_list().transpose(1, 2)
        return by_row.reshape(self.num_rows * self.length, self.rounds).contiguous()

    def max_of_rounds(self, x: Tensor) -> Tensor:
        """Return the maximum over the rounds for each position: (chunks, chunk_len) -> (rows, length)."""
        ranks = self.layout.ranks[self.rows].long()
        return x.view(self.num_rows, self.rounds, -1).gather(2, ranks).amax(dim=1)

    def _by_chunk(self, x: Tensor, empty: int) -> Tensor:
        """(rows, rounds, slots) -> (chunks + 1, chunk_len), with `empty` in the last chunk."""
        return F.pad(x.reshape(-1, self.chunk_len), (0, 0, 0, 1), value=empty)

    def _round_numbers(self) -> Tensor:
        """(rows, rounds, 1), int32"""
        total = self.num_rows * self.rounds
        return torch.arange(total, device=self.index.device, dtype=torch.int32).view(-1, self.rounds, 1)

    def _ranks_in_list(self) -> Tensor:
        """Return the slot of each position in the list of chunks, int32: (rows, rounds, length)."""
        return self.layout.ranks[self.rows] + self._round_numbers() * self.num_slots

    def _by_row(self, x: Tensor, empty: int) -> Tensor:
        """(rows, rounds, length) -> (rows x length + 1, rounds), with `empty` in the last row."""
        return F.pad(x.transpose(1, 2).reshape(-1, self.rounds), (0, 0, 0, 1), value=empty)


class _BucketRows(SortedRows):
    """`visible="bucket"`: a query sees the last chunk_len positions before it in its bucket.

    These are the slots before it in its own chunk, and the slots of the chunk before that are not before its slot in
    the chunk. Offset 0 is the chunk before, offset 1 the own chunk.
    """

    num_offsets = 2

    def __init__(
        self, settings: LSHSettings, layout: Layout, rows: slice, dtype: torch.dtype, rate: float, seed: int
    ) -> None:
        super().__init__(settings, layout, rows, dtype, rate, seed)
        # Two neighbouring chunks have at most 2 chunk_len buckets; one more bit distinguishes neighbouring rounds.
        bits = max(1, (2 * self.chunk_len - 1).bit_length())
        self.num_bits = bits + 1
        buckets = layout.buckets[rows] % (1 << bits) + (self._round_numbers() % 2 << bits)
        self.buckets = self._by_chunk(buckets, 1 << self.num_bits)
        here = torch.arange(self.chunk_len, device=self.index.device)
        self.near = torch.stack([here[:, None] <= here, here[:, None] > here])
        self._counts: tuple[slice, Tensor] | None = None
        if settings.correct_duplicates:
            ranks = self._ranks_in_list().long()
            self.rank_of = self._by_row(ranks, -(1 << 40))
            self.bucket_of = self._by_row(self.buckets[:-1].reshape(-1)[ranks], -2)

    def take_keys(self, table: Tensor, tile: slice) -> list[Tensor]:
        both = _rows_at(table, _with_chunk_before(self.index, tile))
        return [both[:-1], both[1:]]

    def counts(self, tile: slice) -> Tensor:
        if self._counts is not None and self._counts[0] == tile:
            return self._counts[1]
        both = _with_chunk_before(self.buckets, tile)
        same = torch.stack([both[1:, :, None] == both[at : len(both) - 1 + at, None] for at in range(2)])
        counts = (same & self.near[:, None]).to(self.dtype)
        if self.settings.correct_duplicates:
            counts.div_(self._meetings(tile))
        if policy.saves_launches(counts.device):  # as large as the scores
            self._counts = tile, counts
        return counts

    def _meetings(self, tile: slice) -> Tensor:
        """Return in how many rounds each pair meets, at least 1. Cost: one pass over the pairs per round."""
        index = _with_chunk_before(self.index, tile)
        parts = []
        for keys in (index[:-1], index[1:]):
            count = torch.zeros(*keys.shape, self.chunk_len, dtype=self.dtype, device=index.device)
            for turn in range(self.rounds):
                rank, bucket = self.rank_of[:, turn], self.bucket_of[:, turn]
                behind = rank[index[1:]][:, :, None] - rank[keys][:, None]
                together = bucket[index[1:]][:, :, None] == bucket[keys][:, None]
                count += together & (behind > 0) & (behind <= self.chunk_len)
            parts.append(count)
        return torch.stack(parts).clamp_(min=1)

    def key_sums(self, width: int) -> Tensor:
        return torch.empty(self.num_chunks + 1, self.chunk_len, width, dtype=self.dtype, device=self.index.device)

    def add_to_keys(self, sums: Tensor, tile: slice, left: Tensor, right: Tensor) -> None:
        # The sums of the own chunks are written; the next tile adds to the last of them, the chunk before its first.
        torch.bmm(left[1].transpose(1, 2), right, out=sums[tile])
        absent = 1 if tile.start == 0 else 0  # the first chunk has no chunk before it
        before = sums[tile.start - 1 + absent : tile.stop - 1]
        before.baddbmm_(left[0, absent:].transpose(1, 2), right[absent:])


class _CodedBucketRows(_BucketRows):
    """`_BucketRows` for bfloat16: the product that computes the scores also hides pairs of different buckets.

    Each bucket has a code of signs in further columns of queries and keys. The product of two codes is 128 for each
    bit that is equal and -128 for each other bit, and 128 per bit is subtracted. So a pair in the same bucket keeps its
    score, and any other pair gets at most score - 256, whose exp is 0. On processors with bfloat16 instructions a few
    more columns cost less than three passes over the scores.
    """

    _QUERY, _KEY = 8.0, 16.0

    def __init__(
        self, settings: LSHSettings, layout: Layout, rows: slice, dtype: torch.dtype, rate: float, seed: int
    ) -> None:
        super().__init__(settings, layout, rows, dtype, rate, seed)
        self.num_code_columns = self.num_bits
        device = self.index.device
        numbers = torch.arange(1 << self.num_bits, device=device)[:, None]
        signs = (numbers >> torch.arange(self.num_bits, device=device) & 1) * 2.0 - 1
        self.codes = F.pad(signs, (0, 0, 0, 1)).to(dtype)  # the code of the empty chunk is 0: it equals no other
        agreement = self._QUERY * self._KEY * self.num_bits
        self.hidden = torch.where(self.near, -agreement, -1e9).to(dtype)

    def operands(self, tile: slice, queries: Tensor, keys: Tensor) -> tuple[Tensor, list[Tensor]]:
        q = self.take(queries, tile)
        both = _rows_at(keys, _with_chunk_before(self.index, tile))
        codes = _rows_at(self.codes, _with_chunk_before(self.buckets, tile))
        torch.mul(codes[1:], self._QUERY, out=q[..., q.shape[2] - self.num_bits :])
        torch.mul(codes, self._KEY, out=both[..., both.shape[2] - self.num_bits :])
        return q, [both[:-1], both[1:]]

    def scores(self, q: Tensor, keys: list[Tensor]) -> Tensor:
        scores = self.scratch("scores", len(q))
        for one, key, hidden in zip(scores, keys, self.hidden, strict=True):
            torch.baddbmm(hidden.expand(len(q), -1, -1), q, key.transpose(1, 2), out=one)
        return scores

    def weights(self, tile: slice, q: Tensor, keys: list[Tensor]) -> Tensor:
        weights = self.scores(q, keys).exp_()
        return weights.mul_(self.counts(tile)) if self.settings.correct_duplicates else weights


class _ChunkRows(SortedRows):
    """`visible="chunk"`: a query sees its chunk and the neighbouring chunks, as in trax and in `transformers`."""

    def __init__(
        self, settings: LSHSettings, layout: Layout, rows: slice, dtype: torch.dtype, rate: float, seed: int
    ) -> None:
        super().__init__(settings, layout, rows, dtype, rate, seed)
        order = layout.order[rows]
        self.positions = self._by_chunk(torch.where(order < self.length, order, _NO_POSITION), _NO_POSITION)
        # Numbers of buckets are comparable within a round only.
        self.buckets = self._by_chunk(layout.buckets[rows] + self._round_numbers() * (self.num_slots + 1), -1)
        offsets = range(-settings.chunks_before, settings.chunks_after + 1)
        self.num_offsets = len(offsets)
        self.neighbours = [self._neighbours(offset) for offset in offsets]
        if settings.correct_duplicates:
            ranks = self._ranks_in_list().long()
            self.chunk_of = self._by_row(ranks // self.chunk_len, -(1 << 40))
            self.bucket_of = self._by_row(self.buckets[:-1].reshape(-1)[ranks], -2)

    def _neighbours(self, offset: int) -> Tensor:
        """Return the chunk at an offset from each chunk, or `num_chunks` (the empty chunk) if there is none."""
        settings = self.settings
        chunk = torch.arange(self.num_chunks, device=self.index.device)
        ring = self.num_slots // self.chunk_len * (self.rounds if settings.look_across_rounds else 1)
        moved = chunk % ring + offset
        if settings.wrap:
            return chunk - chunk % ring + moved % ring
        return torch.where((moved >= 0) & (moved < ring), chunk + offset, self.num_chunks)

    def take_keys(self, table: Tensor, tile: slice) -> list[Tensor]:
        return [_rows_at(table, self.index[neighbours[tile]]) for neighbours in self.neighbours]

    def counts(self, tile: slice) -> Tensor:
        settings = self.settings
        own_positions, own_buckets = self.positions[tile][:, :, None], self.buckets[tile][:, :, None]
        parts = []
        for neighbours in self.neighbours:
            chunks = neighbours[tile]
            positions = self.positions[chunks][:, None]
            seen = positions < own_positions if settings.causal else positions != own_positions
            seen = seen & (positions < _NO_POSITION)
            if settings.within_bucket:
                seen = seen & (own_buckets == self.buckets[chunks][:, None])
            count = seen.to(self.dtype)
            parts.append(count.div_(self._meetings(tile, chunks)) if settings.correct_duplicates else count)
        return torch.stack(parts)

    def _meetings(self, tile: slice, chunks: Tensor) -> Tensor:
        """Return how often each pair meets over all rounds, at least 1.

        Cost: one pass over the pairs per round and offset, and per other round with `look_across_rounds`.
        """
        own, other = self.index[tile], self.index[chunks]
        count = torch.zeros(*own.shape, self.chunk_len, dtype=self.dtype, device=own.device)
        for turn in range(self.rounds):
            here, bucket = self.chunk_of[own][..., turn], self.bucket_of[own][:, :, None, turn]
            for neighbours in self.neighbours:
                wanted = neighbours[here.clamp(min=0)][:, :, None]
                for other_turn in range(self.rounds) if self.settings.look_across_rounds else [turn]:
                    met = wanted == self.chunk_of[other][:, None, :, other_turn]
                    if self.settings.within_bucket:
                        met = met & (bucket == self.bucket_of[other][:, None, :, other_turn])
                    count += met
        return count.clamp_(min=1)

    def key_sums(self, width: int) -> Tensor:
        return torch.zeros(self.num_chunks + 1, self.chunk_len, width, dtype=self.dtype, device=self.index.device)

    def add_to_keys(self, sums: Tensor, tile: slice, left: Tensor, right: Tensor) -> None:
        for neighbours, one in zip(self.neighbours, left, strict=True):
            sums.index_add_(0, neighbours[tile], torch.bmm(one.transpose(1, 2), right))


def _rows_at(table: Tensor, index: Tensor) -> Tensor:
    """(rows, width), (chunks, chunk_len) -> (chunks, chunk_len, width)"""
    return table.index_select(0, index.reshape(-1)).view(*index.shape, table.shape[1])


def _with_chunk_before(by_chunk: Tensor, tile: slice) -> Tensor:
    """Return the chunks of a tile after the chunk before its first, which is the empty chunk if there is none."""
    if tile.start == 0:
        return torch.cat([by_chunk[-1:], by_chunk[: tile.stop]])
    return by_chunk[tile.start - 1 : tile.stop]


def sorted_groups(
    layout: Layout, settings: LSHSettings, dtype: torch.dtype, *, is_safe: bool, rate: float, seed: int
) -> Iterator[SortedRows]:
    """Yield all rows, as many at a time as `policy` says.

    Args: dtype: of the computation; is_safe: no score exceeds `SAFE_SCORE`; rate, seed: of the dropout on the weights.
    """
    rows, rounds, slots = layout.order.shape
    device = layout.order.device
    kind: type[SortedRows] = _ChunkRows
    if settings.visible == "bucket":
        kind = _CodedBucketRows if is_safe and policy.hides_by_codes(dtype) else _BucketRows
    step = policy.lsh_rows_at_once(rows, rounds * slots, device)
    for first in range(0, rows, step):
        yield kind(settings, layout, slice(first, min(first + step, rows)), dtype, rate, seed)
