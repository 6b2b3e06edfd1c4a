"""A mix of data sets: shares, an order that depends on seed and position only, and every pair of each set in turn."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from manyheads.data.language.segments import SegmentStream
from manyheads.data.mixing import Draws, MixedSegments, join_pairs, lanes_of
from manyheads.data.settings import DataSettings, SegmentSettings, shares_of
from manyheads.data.store import PairStore, TokenStore
from manyheads.data.translation.batches import TrainingStream
from manyheads.errors import ConfigError, DataError

IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}


def pairs(count: int, first: int, length: int = 3) -> PairStore:
    return PairStore.from_lists([([first + one] * (1 + one % length), [first + one]) for one in range(count)], 200)


def mixed(seed: int = 1, accumulate: int = 1) -> TrainingStream:
    settings = DataSettings(
        path="new", mix=("old=0.25", "new=0.75"), max_tokens=48, max_source_len=8, max_target_len=8,
        accumulate=accumulate,
    )  # fmt: skip
    stores = [pairs(100, 10), pairs(30, 110)]
    mix = [("old", 100, 0.25), ("new", 30, 0.75)]
    return TrainingStream(join_pairs(stores), settings, seed, **IDS, mix=mix)


def epoch_of(stream: TrainingStream, epoch: int) -> list[int]:
    return [int(one) for row in range(stream.rows(epoch)) for part in stream.sample_ids(epoch, row) for one in part]


def test_joined_stores_hold_the_pairs_of_each() -> None:
    joined = join_pairs([pairs(3, 10), pairs(2, 50)])
    assert len(joined) == 5
    assert [joined[one][1].tolist() for one in range(5)] == [[10], [11], [12], [50], [51]]
    assert [joined[one][0].tolist() for one in (2, 4)] == [[12, 12, 12], [51, 51]]


def test_an_epoch_has_the_shares_and_all_of_the_main_set_once() -> None:
    drawn = epoch_of(mixed(), 0)
    new = [one for one in drawn if one >= 100]
    assert sorted(new) == list(range(100, 130))
    assert len(drawn) - len(new) == 10  # a quarter of 40


def test_the_other_sets_are_read_to_their_end_before_they_repeat() -> None:
    stream = mixed()
    old = [one for epoch in range(10) for one in epoch_of(stream, epoch) if one < 100]
    assert Counter(old) == Counter(range(100))
    assert len(set(old[:50])) == 50
    assert sorted(old[:10]) != list(range(10))
    later = [one for epoch in range(10, 20) for one in epoch_of(stream, epoch) if one < 100]
    assert set(later[:10]) != set(old[:10])


def test_a_small_set_repeats_within_an_epoch() -> None:
    draws = Draws((np.arange(4), np.arange(4, 24)), (0.5, 0.5), 1, seed=3)
    found = Counter(draws.epoch(7).tolist())
    assert all(found[one] == 5 for one in range(4))
    assert all(found[one] == 1 for one in range(4, 24))


def test_the_order_depends_on_seed_and_position_only() -> None:
    assert epoch_of(mixed(), 5) == epoch_of(mixed(), 5)
    assert epoch_of(mixed(), 5) != epoch_of(mixed(), 6)
    assert epoch_of(mixed(), 5) != epoch_of(mixed(seed=2), 5)
    assert epoch_of(mixed(accumulate=3), 5) == epoch_of(mixed(), 5)


def test_a_step_mixes_the_sets() -> None:
    stream = mixed()
    rows = [[int(one) >= 100 for part in stream.sample_ids(0, row) for one in part] for row in range(stream.rows(0))]
    assert any(True in row and False in row for row in rows)
    assert "10 pairs of old (of 100), 25%" in stream.describe()


def test_a_set_without_usable_pairs_is_refused() -> None:
    settings = DataSettings(path="new", mix=("old=1", "new=1"), max_tokens=48, max_source_len=8, max_target_len=8)
    long = PairStore.from_lists([([5] * 20, [5])] * 3, 200)
    with pytest.raises(DataError, match="old are left: all 3 are too long"):
        TrainingStream(join_pairs([long, pairs(5, 10)]), settings, 1, **IDS, mix=[("old", 3, 0.5), ("new", 5, 0.5)])


@pytest.mark.parametrize(
    ("mix", "path", "message"),
    [
        (("old", "new=1"), "new", "'old'; write FOLDER=SHARE"),
        (("old=0", "new=1"), "new", "'old=0'"),
        (("old=-1", "new=1"), "new", "positive share"),
        (("old=nan", "new=1"), "new", "positive share"),
        (("=1", "new=1"), "new", "FOLDER=SHARE"),
        (("new=1", "new=2"), "new", "names new twice"),
        (("new=1",), "new", "names one folder"),
        (("old=1", "new=1"), "third", "'third', which is not in data.mix"),
    ],
)
@pytest.mark.parametrize("kind", [DataSettings, SegmentSettings])
def test_bad_mixes(mix: tuple[str, ...], path: str, message: str, kind: type) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(mix=mix, path=path)


def test_combinations_that_a_mix_excludes() -> None:
    mix = {"mix": ("old=1", "new=1"), "path": "new"}
    with pytest.raises(ConfigError, match="num_train_pairs"):
        DataSettings(**mix, num_train_pairs=5)
    with pytest.raises(ConfigError, match="needs a lane of its own"):
        SegmentSettings(**mix, lanes=1)
    with pytest.raises(ConfigError, match="equal length"):
        SegmentSettings(**mix, segment_lengths="varied")
    with pytest.raises(ConfigError, match="equal length"):
        SegmentSettings(**mix, documents="separate", order="shuffled")


def test_shares_add_up_to_one() -> None:
    assert shares_of(["a=b=1", "c=3"]) == {"a=b": 0.25, "c": 0.75}


@pytest.mark.parametrize(
    ("shares", "lanes", "wanted"),
    [([0.2, 0.8], 16, [3, 13]), ([0.01, 0.99], 4, [1, 3]), ([0.5, 0.5], 2, [1, 1]), ([1 / 3] * 3, 8, [3, 3, 2])],
)
def test_lanes_follow_the_shares(shares: list[float], lanes: int, wanted: list[int]) -> None:
    assert lanes_of(shares, lanes) == wanted


def texts(accumulate: int = 1) -> MixedSegments:
    settings = SegmentSettings(lanes=2, segment_len=4)
    stores = [TokenStore.from_lists([list(range(1, 22))], 200), TokenStore.from_lists([list(range(100, 160))], 200)]
    streams = [
        SegmentStream(store, replace(settings, lanes=lanes), 1, end_id=None)
        for store, lanes in zip(stores, (1, 2), strict=True)
    ]
    return MixedSegments(streams, ["old", "new"], 1, accumulate)


def test_texts_have_lanes_of_their_own_and_go_on_through_the_epochs() -> None:
    stream = texts()
    assert stream.rows(0) == 8  # 29 targets in each lane of the second text
    first, second = stream.at(0, 0)[0], stream.at(0, 6)[0]
    assert first.tokens[:, 0].tolist() == [1, 100, 129]
    assert second.tokens[0, 0] == 5  # the first text has 5 rows, and begins again
    assert second.resets.tolist() == [False, False, False]
    assert stream.at(0, 5)[0].resets.tolist() == [True, False, False]
    later = stream.at(1, 0)[0]
    assert later.tokens[:, 0].tolist() == [13, 100, 129]
    assert later.resets.tolist() == [True, True, True]


def test_micro_batches_of_texts_hold_the_same_lanes() -> None:
    whole, parts = texts().at(2, 3)[0], texts(accumulate=3).at(2, 3)
    assert len(parts) == 3
    assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
    assert whole.sample_ids[1:].min() >= 21
    with pytest.raises(IndexError):
        texts().at(0, 8)
