"""Packed batches: what lies in them, that a run has one shape, and what does not fit."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data.batch import PackedBatch, PackedShape, PairBatch
from manyheads.data.sampler import PackedBatches
from manyheads.data.settings import DataSettings
from manyheads.data.store import PairStore
from manyheads.data.translation.batches import TrainingStream
from manyheads.errors import ConfigError, DataError, ShapeError

PAD, BOS, EOS = 0, 1, 2
IDS = {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS}
LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(2, 13)), min_size=1, max_size=30)


def pairs_of(lengths: list[tuple[int, int]]) -> PairBatch:
    """Pairs of these lengths, whose ids differ."""
    sizes = torch.tensor(lengths)
    source, target = torch.arange(3, 3 + 2 * len(lengths) * 20).view(2, len(lengths), 20)
    steps = torch.arange(20)
    rows = [ids.masked_fill(steps >= size[:, None], PAD) for ids, size in zip((source, target), sizes.T, strict=True)]
    return PairBatch(rows[0], sizes[:, 0], rows[1], sizes[:, 1], torch.arange(len(lengths)), PAD)


def check(batch: PackedBatch, pairs: PairBatch) -> None:
    """The pairs lie at the beginning of each side; fillers fill the rest, and none is empty or too long."""
    count = len(pairs.sample_ids)
    sides = (
        (batch.source, pairs.source, pairs.source_lengths, batch.source_starts, batch.source_places),
        (batch.target_input, pairs.target_input, pairs.target_lengths - 1, batch.target_starts, batch.target_places),
        (batch.target_labels, pairs.target_labels, pairs.target_lengths - 1, batch.target_starts, batch.target_places),
    )
    for ids, rows, lengths, starts, places in sides:
        bounds = starts.tolist()
        assert (bounds[0], bounds[-1]) == (0, ids.shape[1])
        sizes = [stop - start for start, stop in pairwise(bounds)]
        assert sizes[:count] == lengths.tolist()
        fillers = [size for size in sizes[count:] if size]
        assert min(fillers) >= 1
        assert max(sizes) <= batch.longest
        assert places.tolist() == [place for size in sizes for place in range(size)]
        for row, (start, stop) in enumerate(pairwise(bounds[: count + 1])):
            assert ids[0, start:stop].tolist() == rows[row, : stop - start].tolist()
        assert (ids[0, bounds[count] :] == PAD).all()
    for number in range(count, len(batch.source_starts) - 1):  # a filler has tokens on both sides, or on none
        sizes = [int(starts[number + 1] - starts[number]) for starts in (batch.source_starts, batch.target_starts)]
        assert (sizes[0] == 0) is (sizes[1] == 0)
    assert batch.keep.sum() == batch.num_target_tokens() == pairs.num_target_tokens()
    assert batch.keep[0, : int(batch.keep.sum())].all()


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, data=st.data())
def test_pairs_and_fillers(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    pairs = pairs_of(lengths)
    batch = PackedBatch.of(pairs)
    check(batch, pairs)
    start = data.draw(st.integers(0, len(lengths) - 1))
    some = slice(start, data.draw(st.integers(start + 1, len(lengths))))
    check(batch.rows(some), pairs.rows(some))
    assert batch.rows(some).sample_ids.tolist() == pairs.sample_ids[some].tolist()
    moved = batch.to("meta")
    assert (moved.source.device.type, moved.sample_ids.device.type) == ("meta", "cpu")
    assert "packed into" in batch.describe()


def stream_of(count: int = 60, **changes: Any) -> TrainingStream:
    chance = np.random.default_rng(0)
    pairs = [([5] * int(chance.integers(1, 9)), [6] * int(chance.integers(1, 15))) for _ in range(count)]
    limits: dict[str, Any] = {"max_tokens": 128, "max_source_len": 10, "max_target_len": 16, "batching": "packed"}
    return TrainingStream(PairStore.from_lists(pairs, 100), DataSettings(**{**limits, **changes}), seed=3, **IDS)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_has_one_shape_and_uses_each_pair_once(accumulate: int) -> None:
    stream, again = stream_of(accumulate=accumulate), stream_of(accumulate=accumulate)
    for epoch in range(2):
        seen, shapes = [], set()
        for row in range(stream.rows(epoch)):
            batches = stream.at(epoch, row)
            assert 1 <= len(batches) <= accumulate
            for batch, other in zip(batches, again.at(epoch, row), strict=True):
                check(batch, batch.pairs)
                assert torch.equal(batch.source, other.source)
                shapes.add((batch.source.shape, batch.target_input.shape, batch.source_starts.shape, batch.longest))
                seen += batch.sample_ids.tolist()
        assert sorted(seen) == list(range(60))
        assert len(shapes) == 1
    assert stream.plan(0).digest == again.plan(0).digest != stream.plan(1).digest
    slots = [batch.keep.float().mean().item() for row in range(stream.rows(0) - 1) for batch in stream.at(0, row)]
    assert np.mean(slots) > 0.8  # of the longer side, whose batches of 128 lose half a sentence and the fillers
    assert "batches are packed: " in stream.describe()
    with pytest.raises(IndexError):
        stream.plan(0)[stream.rows(0)]


def test_a_sentence_over_the_bound_is_refused_when_the_plan_is_made() -> None:
    shape = PackedShape(40, 40, 10, longest=8)
    with pytest.raises(DataError, match=r"has 9 source tokens, but at most 8 fit .*raise max_source_len"):
        PackedBatches.pack(np.array([3, 9]), np.array([4, 4]), shape, seed=1, epoch=0)
    with pytest.raises(DataError, match="has 9 target tokens"):
        PackedBatches.pack(np.array([3, 4]), np.array([10, 4]), shape, seed=1, epoch=0)
    PackedBatches.pack(np.array([3, 8]), np.array([9, 4]), shape, seed=1, epoch=0)


@pytest.mark.parametrize("shape", [(64, 64, 9, 8), (64, 64, 1, 20), (19, 64, 9, 20), (64, 20, 9, 20)])
def test_pairs_that_do_not_fit_a_shape(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ShapeError, match=r"2 pairs with 16 source and 19 target tokens.*give fewer or shorter pairs"):
        PackedBatch.of(pairs_of([(12, 10), (4, 11)]), PackedShape(*shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 17, "max_target_len": 16}, "max_tokens 17 .* sentence, and two of filler; raise"),
        (
            {"max_tokens": 35, "max_target_len": 16, "accumulate": 2},
            "35 .* than 16 .* filler.*or lower accumulate",
        ),
        ({"pad_to_multiple": 2}, "pad_to_multiple is 2, but packed batches have one shape; set it to 1"),
    ],
)
def test_settings_that_cannot_be_packed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSettings(batching="packed", max_source_len=10, **{"max_target_len": 12, **changes})


def test_the_smallest_batch_holds_the_longest_pair() -> None:
    store = PairStore.from_lists([([5] * 15, [6] * 15), ([5], [6])] * 3, 100)
    limits = DataSettings(max_tokens=19, max_source_len=16, max_target_len=17, batching="packed")
    stream = TrainingStream(store, limits, seed=1, **IDS)
    assert sorted(i for row in range(stream.rows(0)) for i in stream.at(0, row)[0].sample_ids.tolist()) == [*range(6)]
