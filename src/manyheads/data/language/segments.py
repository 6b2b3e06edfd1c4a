"""Segments of a text, one lane per row, by position; a language model reads them as `SegmentBatch`.

The positions that each lane reads are computed from the number of the row in the epoch. There is no state between rows,
so a run can resume at any row.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 3.2: the memory of a lane after one segment is read with its next one.
Differs: the official code divides the tokens among the lanes, so the first token of every lane except one is never
predicted. Here the targets are divided, and each is predicted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.batch import SegmentBatch
from manyheads.data.sampler import Permutation, mix
from manyheads.data.settings import SegmentSettings, length_at, memory_len_at, memory_lens
from manyheads.errors import ConfigError, DataError
from manyheads.seeding import derive_seed

if TYPE_CHECKING:
    from manyheads.data.store import IntArray, TokenStore

__all__ = ["SegmentBatch", "SegmentStream", "eval_segments"]


STANDARD_DEVIATION = 5
SHORTEST = 5
MOST_ABOVE = 15  # tokens above segment_len: three standard deviations
HALF_SHARE = 0.05  # fraction of segments that are about half as long
DRAW_BITS = 53


@dataclass(frozen=True)
class RowSpans:
    """The positions that one row of a plan reads.

    Attributes:
        starts: (lanes,) position of the first token that each lane predicts.
        lengths: (lanes,) number of tokens it predicts; 0 at the end of its text.
        resets: (lanes,) whether the lane's memory is cleared before the row.
        context: number of tokens before the first that are read again, the same in all lanes.
    """

    starts: IntArray
    lengths: IntArray
    resets: NDArray[np.bool_]
    context: int = 0


def equal_lanes(first: int, stop: int, lanes: int) -> tuple[IntArray, IntArray]:
    """Return starts and lengths of lanes of equal length, for training; the remainder at the end is not read."""
    length = (stop - first) // lanes
    return first + np.arange(lanes, dtype=np.int64) * length, np.full(lanes, length, np.int64)


def even_lanes(first: int, stop: int, lanes: int) -> tuple[IntArray, IntArray]:
    """Return starts and lengths of lanes whose lengths differ by at most one, without remainder, for evaluation."""
    bounds = first + (stop - first) * np.arange(lanes + 1, dtype=np.int64) // lanes
    return bounds[:-1], np.diff(bounds)


class TextLanes:
    """An epoch in which lanes read one text, the same number of tokens at a time.

    Args:
        starts: (lanes,) first token that each lane predicts.
        lengths: (lanes,) number of tokens it predicts.
        total: number of targets in the text, including those that do not fill the lanes.
        segment_len: tokens per row.
        bounds: (rows + 1,) positions where each row begins and ends in the longest lane; None: rows of equal length.
        ext_len: maximum number of tokens before a row that are read again; only tokens of the same lane.

    Attributes:
        num_rows: number of rows.
        num_targets: number of tokens that are predicted.
        left_over: number of targets that do not fill the lanes.
    """

    def __init__(
        self,
        starts: IntArray,
        lengths: IntArray,
        *,
        total: int,
        segment_len: int,
        bounds: IntArray | None = None,
        ext_len: int = 0,
    ) -> None:
        self._starts, self._lengths = starts, lengths
        self._segment_len, self._bounds, self._ext_len = segment_len, bounds, ext_len
        self.num_targets = int(lengths.sum())
        self.left_over = total - self.num_targets
        self._longest = int(lengths.max(initial=0))
        self.num_rows = -(-self._longest // segment_len) if bounds is None else len(bounds) - 1

    def divided(self, parts: int) -> TextLanes:
        """Return the same text in `parts` times as many lanes and rows of equal length that are as many times shorter.

        A lane is divided into lanes whose lengths differ by at most one, so every target is read once, in the same
        number of rows: ceil(ceil(length / parts) / (segment_len / parts)) = ceil(length / segment_len).

        Args: parts: a divisor of segment_len.
        """
        cut = [
            even_lanes(start, start + length, parts)
            for start, length in zip(self._starts.tolist(), self._lengths.tolist(), strict=True)
        ]
        starts, lengths = (np.concatenate(arrays) for arrays in zip(*cut, strict=True))
        total = self.num_targets + self.left_over
        return TextLanes(starts, lengths, total=total, segment_len=self._segment_len // parts)

    def row(self, number: int) -> RowSpans:
        """Raises: IndexError: there is no such row."""
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of {self.num_rows}")
        if self._bounds is None:
            column = number * self._segment_len
            width = min(self._segment_len, self._longest - column)
        else:
            column, stop = self._bounds[number : number + 2].tolist()
            width = stop - column
        lengths = np.clip(self._lengths - column, 0, width)
        resets = np.full(len(lengths), number == 0)
        return RowSpans(self._starts + column, lengths, resets, min(self._ext_len, column))


class DocumentLanes:
    """An epoch in which lanes read whole documents, one after the other.

    Documents keep their order. Each belongs to the lane in whose share of all segments it begins. Therefore lanes can
    differ in length by the longest document, and the shorter ones are empty in the last rows.

    Args:
        starts: (documents,) first token of each that is predicted.
        lengths: (documents,) number of tokens of each that are predicted; a document without targets is left out.
        lanes: number of lanes.
        segment_len: tokens per row; fewer at the end of a document.

    Attributes: num_rows, num_targets, left_over: see `TextLanes`.
    """

    left_over = 0

    def __init__(self, starts: IntArray, lengths: IntArray, *, lanes: int, segment_len: int) -> None:
        known = lengths > 0
        self._starts, self._lengths = starts[known], lengths[known]
        self._segment_len = segment_len
        segments = -(-self._lengths // segment_len)
        self._ends = np.cumsum(segments)  # (documents,) of all segments, lane after lane
        before = self._ends - segments
        total = int(self._ends[-1]) if len(self._ends) else 0
        lane = before * lanes // max(1, total)
        bounds = np.searchsorted(lane, np.arange(lanes + 1))  # (lanes + 1,) documents
        self._lane_segments = np.concatenate([[0], self._ends])[bounds]  # (lanes + 1,) segments
        self.num_targets = int(self._lengths.sum())
        self.num_rows = int(np.diff(self._lane_segments).max(initial=0))

    def row(self, number: int) -> RowSpans:
        """Raises: IndexError: there is no such row."""
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of {self.num_rows}")
        segment = self._lane_segments[:-1] + number  # (lanes,)
        there = segment < self._lane_segments[1:]
        document = np.searchsorted(self._ends, np.where(there, segment, 0), side="right")
        first_segment = self._ends[document] - -(-self._lengths[document] // self._segment_len)
        column = np.where(there, segment - first_segment, 0) * self._segment_len
        lengths = np.where(there, np.minimum(self._lengths[document] - column, self._segment_len), 0)
        return RowSpans(self._starts[document] + column, lengths, there & (column == 0))


def varied_bounds(length: int, segment_len: int, seed: int, epoch: int) -> IntArray:
    """Return the positions where the rows of an epoch begin and end if their lengths are random.

    The distribution is that of the official code (`get_varlen_iter`): normal around segment_len, or, with probability
    0.05, around half of it; rounded down to a whole number of at least 5 and at most segment_len + 15. The length of
    row n depends only on the seed, the epoch and n. It is drawn with integer arithmetic, because the last digit of a
    logarithm differs between machines.

    Args:
        length: tokens of the longest lane.
        segment_len: approximate number of tokens per row.
        seed: the run's seed.
        epoch: number of the epoch.

    Returns: (rows + 1,) from 0 to length.
    """
    lowest, thresholds = _thresholds(segment_len)
    base = np.uint64(derive_seed(seed, "segment lengths", epoch))
    bounds = [np.zeros(1, np.int64)]
    drawn = 0
    while bounds[-1][-1] < length:
        numbers = np.arange(drawn, drawn + 1024, dtype=np.uint64) + base
        draws = mix(mix(numbers)) >> np.uint64(64 - DRAW_BITS)
        lengths = lowest + np.searchsorted(thresholds, draws, side="right")
        bounds.append(bounds[-1][-1] + np.cumsum(lengths))
        drawn += 1024
    ends = np.concatenate(bounds)
    return np.append(ends[ends < length], length)


def _thresholds(segment_len: int) -> tuple[int, NDArray[np.uint64]]:
    """Return the shortest length, and for each length except the longest the draw below which a row is not longer."""
    shortest, longest = min(SHORTEST, segment_len), segment_len + MOST_ABOVE
    shares = [
        (1 - HALF_SHARE) * _below(length + 1, segment_len) + HALF_SHARE * _below(length + 1, segment_len / 2)
        for length in range(shortest, longest)
    ]
    return shortest, np.array([round(share * 2**DRAW_BITS) for share in shares], np.uint64)


def _below(value: float, mean: float) -> float:
    """Return the fraction of a normal distribution that is below a value."""
    return 0.5 * (1 + math.erf((value - mean) / (STANDARD_DEVIATION * math.sqrt(2))))


LanePlan = TextLanes | DocumentLanes


@dataclass(frozen=True)
class _Reading:
    """The text of a store in some order of its documents.

    Attributes:
        store: the text.
        begin_id: the id before the first token of the text. Other documents follow the end of a document.
        order: (documents,) the documents in the order in which they are read; None: their order in the store.
        marked: begin_id also precedes the first token after each reset, because documents do not end in it.
    """

    store: TokenStore
    begin_id: int | None
    order: IntArray | None = None
    marked: bool = False

    @cached_property
    def ends(self) -> IntArray:
        """Position of the end of each document, in the order in which they are read. (documents,)"""
        return np.cumsum(np.diff(self.store.offsets)[self.order])

    def stored_positions(self, positions: IntArray) -> IntArray:
        """Return the position in the store of the token at each position of the text."""
        if self.order is None:
            return positions
        number = np.searchsorted(self.ends, positions, side="right")
        return self.store.offsets[self.order[number] + 1] - (self.ends[number] - positions)

    def batch(self, spans: RowSpans) -> SegmentBatch:
        """Return the segments that a row of a plan reads."""
        lengths = np.where(spans.lengths > 0, spans.lengths + spans.context, 0)
        columns = np.arange(int(lengths.max(initial=0)) + 1)  # one more than is read, for the targets
        positions = (spans.starts - spans.context - 1)[:, None] + columns
        before = positions < 0
        real = (columns <= lengths[:, None]) & (lengths > 0)[:, None]
        stored = self.stored_positions(np.where(real & ~before, positions, 0))
        if self.marked:
            before |= spans.resets[:, None] & (columns == 0)
        run = np.where(before, self.begin_id or 0, self.store.ids[stored].astype(np.int64))
        read = columns[:-1] < lengths[:, None]
        return SegmentBatch(
            tokens=torch.from_numpy(np.where(read, run[:, :-1], 0)),
            targets=torch.from_numpy(np.where(read, run[:, 1:], 0)),
            lengths=torch.from_numpy(lengths),
            resets=torch.from_numpy(spans.resets.copy()),
            sample_ids=torch.from_numpy(np.where(before[:, :1], stored[:, 1:2], stored[:, :1])[:, 0]),
            num_context=spans.context,
        )


class SegmentStream:
    """The training segments of a run, by epoch and row.

    Args:
        store: the training text.
        settings: lanes, lengths and order.
        seed: determines the order of documents and varied lengths.
        end_id: the last token of every document, which is also read before each document (the vocabulary's `end_id`);
            None: the text has no documents, and its first token is not predicted, because no token precedes it.
        ext_len: number of tokens before each segment that are read again.
        begin_id: the id that is read before each document if documents do not end in a token of their own, because all
            have the same length (the vocabulary's `begin_id`).
        placed: with `length_schedule`, give the rows of a short length different positions in the model's table of
            positions (`SegmentBatch.first_positions`), so that all of them are trained.

    Raises:
        DataError: there are no documents to shuffle or to keep separate, they do not end in `end_id`, there are too few
            tokens for the lanes, or for the lengths of the schedule.
        ConfigError: ext_len is negative, or not 0 with separate documents.
    """

    def __init__(
        self,
        store: TokenStore,
        settings: SegmentSettings,
        seed: int,
        *,
        end_id: int | None,
        ext_len: int = 0,
        begin_id: int | None = None,
        placed: bool = False,
    ) -> None:
        _check_ext_len(ext_len, settings.documents)
        self.store = store
        self.settings = settings
        self.seed = seed
        self._end_id, self._ext_len = end_id, ext_len
        self._begin_id = begin_id if end_id is None else end_id
        self._stages, self._placed = settings.stages, placed
        if self._begin_id is None and (settings.documents == "separate" or settings.order == "shuffled"):
            name = "documents" if settings.documents == "separate" else "order"
            raise DataError(
                f"data.{name} is {getattr(settings, name)!r}, but this text has no documents; prepare it with"
                " --documents files or --documents lines, or read it as one text."
            )
        self._plan = lru_cache(maxsize=2)(self._make_plan)
        plan, _ = self._plan(0)
        if plan.num_targets == 0:
            raise DataError(
                f"The training text has {len(store):,} tokens, too few for {settings.lanes} lanes with a token to"
                " predict in each; give more text, or lower data.lanes."
            )
        if self._stages and plan.num_targets < settings.lanes * settings.segment_len:
            raise DataError(
                f"data.length_schedule ends with segments of {settings.segment_len:,} tokens, but each of the"
                f" {settings.lanes} lanes has {plan.num_targets // settings.lanes:,}; give more text, or lower"
                " data.lanes, or data.segment_len and the schedule."
            )

    def _make_plan(self, epoch: int) -> tuple[LanePlan, _Reading]:
        store, options = self.store, self.settings
        order = None
        if options.order == "shuffled":
            _check_ends(store, self._end_id)
            order = Permutation(store.num_documents, self.seed, epoch, "documents").all()
        if options.documents == "separate":
            lanes = _document_lanes(store, order, options.lanes, options.segment_len, self._end_id, self._begin_id)
            return lanes, _Reading(store, self._begin_id, marked=self._end_id is None)
        first = int(self._begin_id is None)
        starts, lengths = equal_lanes(first, max(first, len(store)), options.lanes)
        bounds = None
        if options.segment_lengths == "varied":
            bounds = varied_bounds(int(lengths[0]), options.segment_len, self.seed, epoch)
        total = max(0, len(store) - first)
        length, ext_len = options.segment_len, self._ext_len
        plan = TextLanes(starts, lengths, total=total, segment_len=length, bounds=bounds, ext_len=ext_len)
        return plan, _Reading(store, self._begin_id, order)

    def rows(self, epoch: int) -> int:
        """Return the number of optimiser steps of an epoch; epochs can differ by a few."""
        return self._plan(epoch)[0].num_rows

    def whole(self, epoch: int, row: int, progress: float = 1.0) -> SegmentBatch:
        """Return all lanes of one optimiser step; lanes at the end of their text are rows without tokens.

        Args: progress: of the run before the step, which determines the length in `length_schedule`.

        Raises: IndexError: the epoch has no such row.
        """
        plan, reading = self._plan(epoch)
        length = length_at(self._stages, progress) if self._stages else self.settings.segment_len
        parts = self.settings.segment_len // length
        if parts > 1:
            assert isinstance(plan, TextLanes)  # the settings check this
            batch = reading.batch(plan.divided(parts).row(row))
            if self._placed:
                # In every step each part of the table is used equally often, and by a lane in turn.
                places = (torch.arange(len(batch.lengths)) + epoch + row) % parts
                batch = replace(batch, first_positions=places * length)
        else:
            batch = reading.batch(plan.row(row))
        if self.settings.memory_len_range:
            memory_len = memory_len_at(self.settings.memory_len_range, self.seed, epoch, row)
            batch = replace(batch, memory_len=memory_len)
        if self.settings.loss_on == "half":
            new = batch.tokens.shape[1] - batch.num_context
            batch = replace(batch, num_context=batch.num_context + new // 2)
        return batch

    def at(self, epoch: int, row: int, progress: float = 1.0) -> list[SegmentBatch]:
        """Return the micro-batches of one optimiser step, each with the same lanes as in every other step.

        Args: progress: see `whole`.

        Raises: IndexError: the epoch has no such row.
        """
        return self.whole(epoch, row, progress).split(self.settings.accumulate)

    def describe(self) -> str:
        """Return one line for users, with all tokens that are not read."""
        plan, _ = self._plan(0)
        options = self.settings
        text = (
            f"{plan.num_targets:,} tokens to predict in {options.lanes} lanes,"
            f" {plan.num_rows:,} steps of {options.lanes} x {options.segment_len} an epoch"
        )
        if options.segment_lengths == "varied":
            text += " or so"
        for stage in self._stages[:-1]:
            lanes = options.lanes * options.segment_len // stage.length
            text += f"; until {stage.until:.0%} of the run {lanes} x {stage.length}"
        if options.memory_len_range:
            text += f"; memory of {', '.join(map(str, memory_lens(*options.memory_len_range)))} positions in turn"
        if options.documents == "separate":
            idle = 1 - plan.num_targets / (plan.num_rows * options.lanes * options.segment_len)
            return f"{text}, {self.store.num_documents:,} documents; {idle:.1%} of the places stay empty"
        if plan.left_over:
            text += f"; the last {plan.left_over:,} do not fill the lanes and are not read"
            text += " (others in each epoch)" if options.order == "shuffled" else ""
        return text


def eval_segments(
    store: TokenStore,
    *,
    lanes: int,
    segment_len: int,
    end_id: int | None,
    documents: str = "joined",
    ext_len: int = 0,
    begin_id: int | None = None,
) -> Iterator[SegmentBatch]:
    """Yield a text to score: every token is predicted exactly once, except the first if no token precedes it.

    Args:
        store: the text.
        lanes: number of positions that are read at once; fewer if there are fewer tokens. The first token of each lane
            except the first is predicted from the last token of the lane before, without memory.
        segment_len: number of tokens of a lane at a time.
        end_id: see `SegmentStream`. If given, the first token is predicted from it, in `separate` documents the first
            token of each; otherwise these tokens are not predicted.
        documents: `joined` or `separate`, as in `SegmentSettings`.
        ext_len: number of tokens before each segment that are read again.
        begin_id: see `SegmentStream`.

    Raises:
        ConfigError: a number is out of range, or ext_len is not 0 with separate documents.
        DataError: there is no token to predict.
    """
    if lanes < 1 or segment_len < 1:
        raise ConfigError(f"lanes is {lanes} and segment_len {segment_len}; both must be at least 1.")
    _check_ext_len(ext_len, documents)
    plan: LanePlan
    begin_id = begin_id if end_id is None else end_id
    if documents == "separate":
        plan = _document_lanes(store, None, lanes, segment_len, end_id, begin_id)
    else:
        first = int(begin_id is None)
        total = max(0, len(store) - first)
        starts, lengths = even_lanes(first, first + total, max(1, min(lanes, total)))
        plan = TextLanes(starts, lengths, total=total, segment_len=segment_len, ext_len=ext_len)
    if not plan.num_targets:
        raise DataError(
            f"There is nothing to score: the text has {len(store)} tokens, and none of them can be predicted."
        )
    reading = _Reading(store, begin_id, marked=documents == "separate" and end_id is None and begin_id is not None)
    return (reading.batch(plan.row(number)) for number in range(plan.num_rows))


def _document_lanes(
    store: TokenStore,
    order: IntArray | None,
    lanes: int,
    segment_len: int,
    end_id: int | None,
    begin_id: int | None,
) -> DocumentLanes:
    starts, lengths = store.offsets[:-1], np.diff(store.offsets)
    if order is not None:
        starts, lengths = starts[order], lengths[order]
    _check_ends(store, end_id)
    skipped = int(begin_id is None)  # without begin_id, no token precedes the first of a document
    return DocumentLanes(starts + skipped, lengths - skipped, lanes=lanes, segment_len=segment_len)


def _check_ends(store: TokenStore, end_id: int | None) -> None:
    """Check that every document ends in `end_id`, because it is read before the first token of the next document.

    No document follows the last one of a store that was cut, which may be incomplete.
    """
    if end_id is None or not len(store):
        return
    ends = store.offsets[1:-1] if store.is_cut else store.offsets[1:]
    other = np.flatnonzero(store.ids[ends - 1] != end_id)
    if len(other):
        raise DataError(
            f"Document {other[0]} does not end in token {end_id}, the end of a document; is this the right vocabulary?"
        )


def _check_ext_len(ext_len: int, documents: str) -> None:
    if ext_len < 0:
        raise ConfigError(f"ext_len is {ext_len}; it must be at least 0.")
    if ext_len and documents == "separate":
        raise ConfigError(
            f"ext_len is {ext_len}, but documents are separate and begin in different rows; set ext_len to 0, or"
            " data.documents to 'joined'."
        )
