"""Batches: what is in them, which pairs they leave out, and that a position always gives the same one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data.batch import PairBatch
from manyheads.data.collate import collate
from manyheads.data.sampler import next_position
from manyheads.data.settings import DataSettings
from manyheads.data.store import PairStore
from manyheads.data.translation.batches import TrainingStream, eval_batches
from manyheads.errors import ConfigError, DataError

PAD, BOS, EOS = 0, 1, 2
TENSORS = ("source", "source_lengths", "target", "target_lengths", "sample_ids")
IDS = {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS}
PAIRS = st.lists(
    st.tuples(st.lists(st.integers(4, 99), max_size=9), st.lists(st.integers(4, 99), max_size=9)),
    min_size=1,
    max_size=40,
)


def rows_of(ids: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The rows without padding, having checked that padding is all there is behind them."""
    for row, length in zip(ids, lengths.tolist(), strict=True):
        assert (row[length:] == PAD).all()
    return [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]


@settings(deadline=None, max_examples=50)
@given(pairs=PAIRS, data=st.data())
def test_collate(pairs: list[tuple[list[int], list[int]]], data: st.DataObject) -> None:
    store = PairStore.from_lists(pairs, 100)
    samples = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=8))
    batch = collate(store, np.array(samples), **IDS)
    assert rows_of(batch.source, batch.source_lengths) == [[*pairs[index][0], EOS] for index in samples]
    assert rows_of(batch.target, batch.target_lengths) == [[BOS, *pairs[index][1], EOS] for index in samples]
    assert batch.sample_ids.tolist() == samples
    assert all(getattr(batch, name).dtype == torch.int64 for name in TENSORS)
    assert batch.source.shape[1] == batch.source_lengths.max()
    assert batch.target.shape[1] == batch.target_lengths.max()
    assert batch.num_target_tokens() == sum(len(pairs[index][1]) + 1 for index in samples)


def test_collate_cuts_and_keeps_the_ends() -> None:
    store = PairStore.from_lists([([5, 6, 7, 8], [9, 10, 11, 12]), ([5], [9])], 100)
    batch = collate(store, np.array([0, 1]), **IDS, max_source_len=3, max_target_len=4)
    assert batch.source.tolist() == [[5, 6, EOS], [5, EOS, PAD]]
    assert batch.target.tolist() == [[BOS, 9, 10, EOS], [BOS, 9, EOS, PAD]]


def random_store(count: int, longest: int = 20) -> PairStore:
    chance = np.random.default_rng(0)
    pairs = [
        [chance.integers(4, 100, chance.integers(1, longest + 1)).tolist() for _ in range(2)] for _ in range(count)
    ]
    return PairStore.from_lists([(source, target) for source, target in pairs], 100)


def stream(store: PairStore, **options: object) -> TrainingStream:
    known = {"max_tokens": 100, "max_source_len": 30, "max_target_len": 30, **options}
    return TrainingStream(store, DataSettings(**known), 1, **IDS)  # type: ignore[arg-type]


def samples_of(batches: list[PairBatch]) -> list[int]:
    return [sample for batch in batches for sample in batch.sample_ids.tolist()]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_epoch_holds_every_pair_once_within_the_budget(accumulate: int) -> None:
    store = random_store(500)
    feed = stream(store, accumulate=accumulate)
    steps = [feed.at(0, row) for row in range(feed.rows(0))]
    assert sorted(sample for step in steps for sample in samples_of(step)) == list(range(500))
    for step in steps:
        rows = sum(len(batch.source) for batch in step)
        assert 1 <= len(step) <= accumulate
        assert rows * max(max(batch.source.shape[1], batch.target.shape[1]) for batch in step) <= 100
    assert feed.report.describe().startswith("500 of 500 training pairs kept, 0 too long")


def test_a_position_gives_the_same_batch_to_a_stream_made_anew() -> None:
    store = random_store(200)
    one, other = stream(store, accumulate=2), stream(store, accumulate=2)
    for epoch in range(4):
        one.at(epoch, one.rows(epoch) - 1)
    for epoch, row in ((3, 5), (0, 0), (7, 1)):
        for batch, again in zip(one.at(epoch, row), other.at(epoch, row), strict=True):
            assert all(torch.equal(getattr(batch, name), getattr(again, name)) for name in TENSORS)
    assert one.plan(0).digest != one.plan(1).digest
    with pytest.raises(IndexError):
        one.at(0, one.rows(0))


def test_positions_follow_one_another() -> None:
    assert next_position(0, 0, 8) == (0, 1)
    assert next_position(2, 7, 8) == (3, 0)


LONG = [([5] * 4, [6] * 4), ([5] * 20, [6] * 4), ([5] * 4, [6] * 20), ([5] * 9, [6] * 8)]


def test_too_long_pairs_are_dropped() -> None:
    feed = stream(PairStore.from_lists(LONG, 100), max_source_len=10, max_target_len=10)
    assert sorted(sample for row in range(feed.rows(0)) for sample in samples_of(feed.at(0, row))) == [0, 3]
    report = feed.report
    assert (report.total, report.too_long, report.kept, report.longest_source, report.longest_target) == (
        4,
        2,
        2,
        21,
        22,
    )
    assert report.describe() == (
        "2 of 4 training pairs kept, 2 too long and dropped (longest source 21, target 22 tokens): data.max_source_len"
        " is 10, 21 would drop none; data.max_target_len is 10, 22 would drop none"
    )
    one_side = stream(PairStore.from_lists(LONG, 100), max_source_len=30, max_target_len=10).report.describe()
    assert one_side.endswith("(longest source 21, target 22 tokens): data.max_target_len is 10, 22 would drop none")
    for source, target, kept in ((21, 22, 4), (20, 22, 3), (21, 21, 3)):  # the lengths that it names are enough
        found = stream(PairStore.from_lists(LONG, 100), max_source_len=source, max_target_len=target).report
        assert found.kept == kept


def test_too_long_pairs_are_truncated() -> None:
    feed = stream(PairStore.from_lists(LONG, 100), max_source_len=10, max_target_len=10, too_long="truncate")
    batches = [batch for row in range(feed.rows(0)) for batch in feed.at(0, row)]
    assert sorted(samples_of(batches)) == [0, 1, 2, 3]
    assert max(batch.source.shape[1] for batch in batches) == 10
    assert max(batch.target.shape[1] for batch in batches) == 10
    told = feed.report.describe()
    assert "4 of 4 training pairs kept, 2 too long and truncated" in told
    assert told.endswith("data.max_source_len is 10, 21 would cut none; data.max_target_len is 10, 22 would cut none")


def test_too_long_pairs_fail() -> None:
    with pytest.raises(DataError, match=r"2 training pairs are too long .* pair 1 with 21 source and 6 target"):
        stream(PairStore.from_lists(LONG, 100), max_source_len=10, max_target_len=10, too_long="fail")


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(DataError, match="all 4 are too long"):
        stream(PairStore.from_lists(LONG, 100), max_source_len=2, max_target_len=3)
    with pytest.raises(DataError, match="The training data has no sentence pairs"):
        stream(PairStore.from_lists([], 100))


def test_only_the_first_pairs() -> None:
    feed = stream(random_store(100), num_train_pairs=10)
    assert sorted(sample for row in range(feed.rows(0)) for sample in samples_of(feed.at(0, row))) == list(range(10))
    told = feed.report.describe()
    assert told.startswith("10 of 10 training pairs kept, 0 too long")
    assert told.endswith("Only the first 10 of 100 pairs are used, because data.num_train_pairs is 10; 0 uses all")
    for enough in (0, 100, 1000):
        assert "num_train_pairs" not in stream(random_store(100), num_train_pairs=enough).report.describe()


def test_evaluation_sees_everything_once_shortest_first() -> None:
    store = random_store(300)
    batches = list(eval_batches(store, 64, **IDS))
    assert sorted(samples_of(batches)) == list(range(300))
    for batch in batches:
        assert len(batch.source) == 1 or len(batch.source) * max(batch.source.shape[1], batch.target.shape[1]) <= 64
    longest = [int(batch.target_lengths.max()) for batch in batches]
    assert longest == sorted(longest)


def test_evaluation_keeps_what_is_over_the_budget_and_what_is_empty() -> None:
    store = PairStore.from_lists([([5] * 50, [6] * 50), ([], [])], 100)
    batches = list(eval_batches(store, 16, **IDS))
    assert [batch.sample_ids.tolist() for batch in batches] == [[1], [0]]
    assert batches[0].source.tolist() == [[EOS]]
    assert batches[0].target.tolist() == [[BOS, EOS]]
    assert list(eval_batches(PairStore.from_lists([], 100), 16, **IDS)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "data.max_tokens is 0"),
        ({"accumulate": 0}, "data.accumulate is 0"),
        ({"num_train_pairs": -1}, "data.num_train_pairs"),
        ({"max_tokens": 512, "accumulate": 4}, "leaves fewer than 256 tokens per micro-batch"),
    ],
)
def test_settings_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSettings(**options)  # type: ignore[arg-type]
