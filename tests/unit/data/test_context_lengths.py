"""Lengths that change during training, against slow and obvious readers of lists."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data.language.segments import SegmentBatch, SegmentStream
from manyheads.data.mixing import MixedSegments
from manyheads.data.settings import SegmentSettings, Stage, length_at, memory_len_at, memory_lens, stages_of
from manyheads.data.store import TokenStore
from manyheads.errors import ConfigError, DataError

SCHEDULE = ("4=0.3", "8=0.6", "16=1")


def stream_of(tokens: int, placed: bool = False, **options: Any) -> SegmentStream:
    store = TokenStore.from_lists([list(range(tokens))], 10**5)
    return SegmentStream(store, SegmentSettings(**options), 1, end_id=None, placed=placed)


def rows_of(batch: SegmentBatch) -> list[tuple[list[int], list[int], bool]]:
    """Each lane's real tokens and targets, and whether it forgets; all others must be 0."""
    found = []
    for lane, length in enumerate(batch.lengths.tolist()):
        assert not batch.tokens[lane, length:].any()
        assert not batch.targets[lane, length:].any()
        row = batch.tokens[lane, :length].tolist(), batch.targets[lane, :length].tolist()
        found.append((*row, bool(batch.resets[lane])))
    return found


def test_a_length_holds_until_its_share() -> None:
    stages = stages_of(SCHEDULE, 16)
    assert stages == (Stage(4, 0.3), Stage(8, 0.6), Stage(16, 1.0))
    by_step = [length_at(stages, step / 10) for step in range(11)]
    assert by_step == [4, 4, 4, 8, 8, 8, 16, 16, 16, 16, 16]
    assert [length_at(stages, share) for share in (0.2999, 0.3, 0.5999, 0.6)] == [4, 8, 8, 16]
    assert stages_of((), 16) == ()


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 400),
    lanes=st.integers(1, 4),
    length=st.integers(1, 5),
    parts=st.integers(2, 6),
    epoch=st.integers(0, 2),
)
def test_a_short_length_reads_every_lane_at_several_places(tokens, lanes, length, parts, epoch):
    """Each lane is a list of targets, cut into `parts` lists; each step reads the next `length` of each."""
    full = length * parts
    schedule = (f"{length}=0.5", f"{full}=1")
    share = (tokens - 1) // lanes
    if share < full:
        with pytest.raises(DataError, match=f"ends with segments of {full} tokens" if share else "too few"):
            stream_of(tokens, lanes=lanes, segment_len=full, length_schedule=schedule)
        return
    feed = stream_of(tokens, lanes=lanes, segment_len=full, length_schedule=schedule)
    steps = [rows_of(feed.whole(epoch, row, 0.49)) for row in range(feed.rows(epoch))]
    wanted: list[list[Any]] = [[] for _ in steps]
    for lane in range(lanes):
        for part in range(parts):
            places = range(lane * share + share * part // parts, lane * share + share * (part + 1) // parts)
            cut = [places[start : start + length] for start in range(0, len(steps) * length, length)]
            assert sum(map(len, cut)) == len(places)
            for row, some in enumerate(cut):
                wanted[row].append((list(some), [place + 1 for place in some], row == 0))
    assert steps == wanted
    plain = stream_of(tokens, lanes=lanes, segment_len=full)
    assert plain.rows(epoch) == len(steps)
    whole = [row for step in steps for row in step]
    usual = [row for number in range(len(steps)) for row in rows_of(plain.whole(epoch, number))]
    assert Counter(itertools.chain(*(row[1] for row in whole))) == Counter(itertools.chain(*(row[1] for row in usual)))


def test_the_last_length_reads_what_a_plain_run_reads() -> None:
    plain, feed = (stream_of(200, placed=True, lanes=2, segment_len=16, length_schedule=one) for one in ((), SCHEDULE))
    for row in range(plain.rows(0)):
        for progress in (0.6, 1.0):
            found = feed.whole(0, row, progress)
            assert rows_of(found) == rows_of(plain.whole(0, row))
            assert found.first_positions is None


def test_every_step_has_as_many_tokens_and_trains_every_position() -> None:
    feed = stream_of(2000, placed=True, lanes=2, segment_len=16, length_schedule=SCHEDULE, accumulate=2)
    for progress, length in ((0.0, 4), (0.3, 8)):
        seen: dict[int, set[int]] = {}
        for row in range(8):
            batch = feed.whole(0, row, progress)
            assert batch.tokens.shape == (32 // length, length)
            places = batch.first_positions.tolist()
            assert sorted(places) == sorted([*range(0, 16, length)] * 2)
            for lane, place in enumerate(places):
                seen.setdefault(lane, set()).add(place)
            parts = feed.at(0, row, progress)
            assert [place for part in parts for place in part.first_positions.tolist()] == places  # type: ignore[union-attr]
        # Each place of the text meets each position.
        assert all(len(found) == 16 // length for found in seen.values())
    assert stream_of(200, lanes=2, segment_len=16, length_schedule=SCHEDULE).whole(0, 0, 0.0).first_positions is None


def test_a_mix_divides_the_lanes_of_every_text() -> None:
    options = SegmentSettings(lanes=1, segment_len=8, length_schedule=("4=0.5", "8=1"), memory_len_range=(0, 3))
    stores = [TokenStore.from_lists([list(range(first, first + 60))], 300) for first in (0, 100)]
    streams = [
        SegmentStream(store, replace(options, lanes=lanes), 1, end_id=None, placed=True)
        for store, lanes in zip(stores, (1, 2), strict=True)
    ]
    mixed = MixedSegments(streams, ["old", "new"], 1, 1)
    [batch] = mixed.at(0, 1, 0.2)
    assert batch.tokens[:, 0].tolist() == [4, 33, 104, 118, 133, 147]
    assert batch.first_positions.tolist() == [4, 0, 4, 0, 4, 0]
    for row in range(3):
        assert mixed.at(0, row)[0].memory_len == streams[1].whole(0, row).memory_len
    assert mixed.at(0, 0, 0.5)[0].tokens.shape == (3, 8)


def test_memory_lengths_are_few_and_drawn_by_the_place_of_the_step() -> None:
    assert memory_lens(64, 256) == (64, 128, 192, 256)
    assert memory_lens(0, 2) == (0, 1, 2)
    assert memory_lens(7, 7) == (7,)
    drawn = [memory_len_at((64, 256), 1, epoch, row) for epoch in range(4) for row in range(500)]
    counts = Counter(drawn)
    assert set(counts) == {64, 128, 192, 256}
    assert min(counts.values()) > 420
    assert drawn[:40] == [memory_len_at((64, 256), 1, 0, row) for row in range(40)]
    assert drawn[:40] != [memory_len_at((64, 256), 2, 0, row) for row in range(40)]
    assert drawn[:40] != drawn[500:540]
    feed = stream_of(2000, lanes=2, segment_len=16, memory_len_range=(64, 256), accumulate=2)
    for row in range(40):
        assert [part.memory_len for part in feed.at(0, row)] == [drawn[row]] * 2
    assert stream_of(200, lanes=2, segment_len=16).whole(0, 0).memory_len is None


def test_the_description_names_the_lengths() -> None:
    text = stream_of(200, lanes=2, segment_len=16, length_schedule=SCHEDULE).describe()
    assert "; until 30% of the run 8 x 4; until 60% of the run 4 x 8" in text
    text = stream_of(200, lanes=2, segment_len=16, memory_len_range=(0, 3)).describe()
    assert "memory of 0, 1, 2, 3 positions in turn" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_schedule": ["4"]}, r"contains '4'; write LENGTH=SHARE"),
        ({"length_schedule": ["4:0.5", "16:1"]}, r"contains '4:0.5'; write LENGTH=SHARE"),
        ({"length_schedule": ["0=0.5", "16=1"]}, "contains '0=0.5'"),
        ({"length_schedule": ["4=0", "16=1"]}, "contains '4=0'"),
        ({"length_schedule": ["4=nan", "16=1"]}, "contains '4=nan'"),
        ({"length_schedule": ["4=1.5", "16=1"]}, "contains '4=1.5'"),
        ({"length_schedule": ["4=0.5", "32=1"]}, "contains 32, longer than data.segment_len 16"),
        ({"length_schedule": ["5=0.5", "16=1"]}, "contains 5, which does not divide data.segment_len 16"),
        ({"length_schedule": ["4=0.5", "8=0.5", "16=1"]}, "share 0.5 after 0.5"),
        ({"length_schedule": ["4=0.5", "16=0.9"]}, "ends with 16 until 0.9; the last entry must be .*: 16=1"),
        ({"length_schedule": ["4=0.5", "8=1"]}, "ends with 8 until 1; the last entry must be .*: 16=1"),
        ({"length_schedule": SCHEDULE, "segment_lengths": "varied"}, "segment_lengths is 'varied'"),
        ({"length_schedule": SCHEDULE, "documents": "separate"}, "documents is 'separate'"),
        ({"memory_len_range": (3,)}, r"memory_len_range is \[3\]; give two numbers"),
        ({"memory_len_range": (3, 2)}, r"memory_len_range is \[3, 2\]"),
        ({"memory_len_range": (-1, 2)}, r"memory_len_range is \[-1, 2\]"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SegmentSettings(segment_len=16, **options)
