"""Segments against slow and obvious readers of lists: what each lane reads, predicts and forgets, and that nothing is
lost, doubled or read across a boundary."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data.language.segments import SHORTEST, SegmentBatch, SegmentStream, eval_segments, varied_bounds
from manyheads.data.sampler import Permutation, next_position
from manyheads.data.settings import SegmentSettings
from manyheads.data.store import TokenStore
from manyheads.errors import ConfigError, DataError

END = 999
VOCAB = 1000
Row = tuple[list[int], list[int], bool]  # tokens, targets, whether the lane forgets


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths, each token another one, none of them 0, each document with its end."""
    token = iter(range(1, 10**6))
    return [[*(next(token) for _ in range(length)), END] for length in lengths]


def store_of(documents: list[list[int]]) -> TokenStore:
    return TokenStore.from_lists(documents, VOCAB)


def rows_of(batch: SegmentBatch) -> list[Row]:
    """Each lane's real tokens; all others must be 0."""
    width = batch.tokens.shape[1]
    assert width == batch.lengths.max()
    found = []
    for lane, length in enumerate(batch.lengths.tolist()):
        assert not batch.tokens[lane, length:].any()
        assert not batch.targets[lane, length:].any()
        row = batch.tokens[lane, :length].tolist(), batch.targets[lane, :length].tolist()
        found.append((*row, bool(batch.resets[lane])))
    assert batch.tokens.dtype == batch.targets.dtype == batch.lengths.dtype == batch.sample_ids.dtype == torch.int64
    assert batch.resets.dtype == torch.bool
    assert batch.tokens.shape == batch.targets.shape == (len(found), width)
    return found


def joined_lanes(text: list[int], starts: list[int], bounds: list[int], ext_len: int) -> list[list[tuple[Row, int]]]:
    """Step by step and lane by lane: [start of lane, its end) of what is read, cut at bounds."""
    steps = []
    for low, high in itertools.pairwise(bounds):
        context = min(ext_len, low)
        step = []
        for start, stop in itertools.pairwise(starts):
            places = range(start + low, min(start + high, stop))
            places = range(places.start - context, places.stop) if len(places) else places
            row = [text[place] for place in places], [text[place + 1] for place in places], low == 0
            step.append((row, context))
        steps.append(step)
    return steps


def documents_lanes(documents: list[list[int]], lanes: int, length: int) -> list[list[Row]]:
    """Whole documents, each cut by itself, given to the lane in whose share of all segments they begin."""
    cut: list[list[Row]] = []
    for document in documents:
        pairs = list(itertools.pairwise(document))
        parts = [pairs[start : start + length] for start in range(0, len(pairs), length)]
        cut.append([([a for a, _ in part], [b for _, b in part], number == 0) for number, part in enumerate(parts)])
    total = sum(map(len, cut))
    queues: list[list[Row]] = [[] for _ in range(lanes)]
    begun = 0
    for rows in cut:
        if rows:
            queues[begun * lanes // total] += rows
        begun += len(rows)
    most = max(map(len, queues))
    nothing: Row = ([], [], False)
    return [[queue[step] if step < len(queue) else nothing for queue in queues] for step in range(most)]


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, data=st.data())
def test_training_segments(lengths: list[int], data: st.DataObject) -> None:
    documents = documents_of(lengths)
    end_id = data.draw(st.sampled_from([END, None]))
    options: dict[str, Any] = {
        "lanes": data.draw(st.integers(1, 4)),
        "segment_len": data.draw(st.integers(1, 9)),
        "order": data.draw(st.sampled_from(["text", "shuffled"])) if end_id else "text",
        "documents": data.draw(st.sampled_from(["joined", "separate"])) if end_id else "joined",
    }
    ext_len = data.draw(st.integers(0, 5)) if options["documents"] == "joined" else 0
    if options["documents"] == "joined" and data.draw(st.booleans()):
        options["segment_lengths"] = "varied"
    seed, epoch = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    order = Permutation(len(documents), seed, epoch, "documents").all().tolist()
    known = [documents[number] for number in order] if options["order"] == "shuffled" else documents
    try:
        feed = SegmentStream(store_of(documents), SegmentSettings(**options), seed, end_id=end_id, ext_len=ext_len)
    except DataError:
        assert sum(map(len, documents)) - (end_id is None) < options["lanes"]
        return
    steps = [feed.whole(epoch, row) for row in range(feed.rows(epoch))]
    if options["documents"] == "separate":
        wanted = documents_lanes([[END, *document] for document in known], options["lanes"], options["segment_len"])
        assert [rows_of(step) for step in steps] == wanted
        assert all(step.num_context == 0 for step in steps)
    else:
        text = [*([END] if end_id else []), *(token for document in known for token in document)]
        length = (len(text) - 1) // options["lanes"]
        bounds = [*range(0, length, options["segment_len"]), length]
        if "segment_lengths" in options:
            bounds = varied_bounds(length, options["segment_len"], seed, epoch).tolist()
        starts = [lane * length for lane in range(options["lanes"] + 1)]
        expected = joined_lanes(text, starts, bounds, ext_len)
        assert [[(row, step.num_context) for row in rows_of(step)] for step in steps] == expected
    for step in steps:
        counted = [len(row[1]) - step.num_context for row in rows_of(step)]
        assert step.num_target_tokens() == sum(max(0, count) for count in counted)


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, data=st.data())
def test_evaluation_predicts_every_token_once(lengths: list[int], data: st.DataObject) -> None:
    documents = documents_of(lengths)
    end_id = data.draw(st.sampled_from([END, None]))
    mode = data.draw(st.sampled_from(["joined", "separate"]))
    lanes, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    ext_len = data.draw(st.integers(0, 5)) if mode == "joined" else 0
    arguments: dict[str, Any] = {"lanes": lanes, "segment_len": length, "end_id": end_id, "documents": mode}
    first = [END] if end_id else []
    if mode == "joined":
        text = [*first, *(token for document in documents for token in document)]
        expected = Counter(text[1:])
    else:
        known = [[*first, *document] for document in documents]
        expected = Counter(token for document in known for token in document[1:])
    if not expected:
        with pytest.raises(DataError, match="nothing to score"):
            eval_segments(store_of(documents), **arguments)
        return
    found: Counter[int] = Counter()
    after: dict[int, int] = {}
    for step in eval_segments(store_of(documents), ext_len=ext_len, **arguments):
        for lane, (tokens, targets, reset) in enumerate(rows_of(step)):
            if not tokens:
                continue
            assert len(tokens) - step.num_context <= length
            found.update(targets[step.num_context :])
            assert tokens[1:] == targets[:-1]
            if not reset:
                assert tokens[step.num_context] == after[lane]  # it goes on where it was
            after[lane] = targets[-1]
    assert found == expected
    if mode == "separate":
        wanted = documents_lanes(known, lanes, length)
        assert [rows_of(step) for step in eval_segments(store_of(documents), **arguments)] == wanted


def test_lanes_of_evaluation_differ_by_one_at_most() -> None:
    store = store_of([list(range(12))])
    steps = list(eval_segments(store, lanes=4, segment_len=2, end_id=None))
    assert [step.lengths.tolist() for step in steps] == [[2, 2, 2, 2], [0, 1, 1, 1]]
    assert [step.resets.tolist() for step in steps] == [[True] * 4, [False] * 4]
    assert steps[0].tokens[:, 0].tolist() == [0, 2, 5, 8]
    assert [
        len(step.lengths) for step in eval_segments(store_of([[1, 2, 3]]), lanes=8, segment_len=2, end_id=None)
    ] == [2]


def test_rows_say_where_they_begin() -> None:
    documents = documents_of([5, 0, 7, 2])
    store = store_of(documents)
    for options in (
        {},
        {"order": "shuffled"},
        {"documents": "separate"},
        {"order": "shuffled", "documents": "separate"},
    ):
        feed = SegmentStream(store, SegmentSettings(lanes=2, segment_len=3, **options), 1, end_id=END)  # type: ignore[arg-type]
        for row in range(feed.rows(0)):
            for place, (tokens, targets, _) in zip(
                feed.at(0, row)[0].sample_ids.tolist(), rows_of(feed.whole(0, row)), strict=True
            ):
                if tokens:
                    begins = tokens[0] == END and store.ids[place] != END
                    assert store.ids[place] == (targets[0] if begins else tokens[0])


def random_store(size: int = 3000, documents: int = 40) -> TokenStore:
    chance = np.random.default_rng(0)
    cuts = np.sort(chance.integers(0, size, documents - 1)).tolist()
    ids = chance.integers(0, END, size)
    return store_of([[*part.tolist(), END] for part in np.split(ids, cuts)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"segment_lengths": "varied"},
        {"order": "shuffled"},
        {"order": "shuffled", "segment_lengths": "varied"},
        {"documents": "separate"},
        {"documents": "separate", "order": "shuffled"},
    ],
)
def test_a_position_gives_the_same_batch_whatever_came_before(options: dict[str, str]) -> None:
    store = random_store()

    def make(seed: int = 3) -> SegmentStream:
        chosen = SegmentSettings(lanes=6, segment_len=16, accumulate=4, **options)  # type: ignore[arg-type]
        return SegmentStream(store, chosen, seed, end_id=END, ext_len=0)

    feed, position, seen = make(), (0, 0), []
    for _ in range(3 * feed.rows(0)):
        seen.append((position, feed.at(*position)))
        position = next_position(*position, feed.rows(position[0]))
    for position, batches in seen[::-7]:
        again = make().at(*position)
        assert [len(batch.lengths) for batch in again] == [2, 2, 1, 1]
        for one, other in zip(batches, again, strict=True):
            for name in ("tokens", "targets", "lengths", "resets", "sample_ids"):
                assert torch.equal(getattr(one, name), getattr(other, name)), (position, name)
    epochs = [torch.cat([batch.tokens.ravel() for batch in feed.at(epoch, 1)]).tolist() for epoch in (0, 1)]
    other = torch.cat([batch.tokens.ravel() for batch in make(4).at(0, 1)]).tolist()
    assert (epochs[0] == epochs[1] == other) == (options in ({}, {"documents": "separate"}))
    with pytest.raises(IndexError):
        feed.at(0, feed.rows(0))
    with pytest.raises(IndexError):
        feed.at(0, -1)


def test_shuffled_sentences_are_those_of_the_official_iterator() -> None:
    """lm1b: `<S> words <S>`, one after the other in each lane; the end of one is the beginning of the next."""
    documents = documents_of([3, 6, 1, 4, 9, 2])
    feed = SegmentStream(store_of(documents), SegmentSettings(lanes=1, segment_len=4, order="shuffled"), 5, end_id=END)
    order = Permutation(len(documents), 5, 0, "documents").all().tolist()
    pairs = []
    for number in order:
        sentence = [END, *documents[number]]
        pairs += list(itertools.pairwise(sentence))
    found: list[tuple[int, int]] = []
    for row in range(feed.rows(0)):
        ((tokens, targets, _),) = rows_of(feed.whole(0, row))
        found += zip(tokens, targets, strict=True)
    assert found == pairs
    assert sorted(order) == list(range(6))
    assert order != sorted(order)


def test_varied_lengths_are_distributed_as_in_the_official_code() -> None:
    lengths = np.diff(varied_bounds(4_000_000, 100, 7, 0))[:-1]
    assert lengths.min() >= SHORTEST
    assert lengths.max() <= 115
    half = lengths < 75  # five standard deviations from either mean
    assert abs(half.mean() - 0.05) < 0.005
    assert abs(lengths[~half].mean() - 99.5) < 0.1  # a whole number is cut down: half a token less
    assert abs(lengths[half].mean() - 49.5) < 0.5
    assert 4.8 < lengths[~half].std() < 5.1
    assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < 0.02
    for segment_len in (1, 3, 8):
        short = np.diff(varied_bounds(20_000, segment_len, 0, 0))[:-1]
        assert short.min() >= min(SHORTEST, segment_len)
        assert short.max() <= segment_len + 15
    whole = varied_bounds(5000, 100, 7, 1)
    assert whole[0] == 0
    assert whole[-1] == 5000
    assert np.array_equal(whole[:-1], varied_bounds(9000, 100, 7, 1)[: len(whole) - 1])
    assert varied_bounds(0, 100, 7, 1).tolist() == [0]


def test_what_is_left_over_is_told() -> None:
    store = store_of(documents_of([50, 60]))  # 112 tokens

    def told(end_id: int | None = END, **options: Any) -> str:
        return SegmentStream(store, SegmentSettings(**options), 0, end_id=end_id).describe()

    assert told(lanes=4, segment_len=10) == "112 tokens to predict in 4 lanes, 3 steps of 4 x 10 an epoch"
    text = told(None, lanes=10, segment_len=5, segment_lengths="varied")
    assert "110 tokens to predict in 10 lanes" in text
    assert "an epoch or so; the last 1 do not fill the lanes and are not read" in text
    assert "(others in each epoch)" in told(lanes=10, order="shuffled")
    assert told(lanes=2, segment_len=61, documents="separate").endswith("2 documents; 8.2% of the places stay empty")


def test_what_cannot_be_read_is_refused() -> None:
    store, unended = store_of([[1, 2, 3]]), store_of([[1, END], [2, 3]])
    for options in ({"order": "shuffled"}, {"documents": "separate"}):
        with pytest.raises(DataError, match="prepare it with --documents"):
            SegmentStream(store, SegmentSettings(lanes=1, **options), 0, end_id=None)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="Document 1 does not end in token 999"):
            SegmentStream(unended, SegmentSettings(lanes=1, **options), 0, end_id=END)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="too few for 3 lanes"):
        SegmentStream(store, SegmentSettings(lanes=3), 0, end_id=None)
    with pytest.raises(DataError, match="too few"):
        SegmentStream(store_of([]), SegmentSettings(), 0, end_id=END)
    with pytest.raises(ConfigError, match="ext_len is 2, but documents are separate"):
        SegmentStream(store, SegmentSettings(lanes=1, documents="separate"), 0, end_id=END, ext_len=2)
    with pytest.raises(ConfigError, match="at least 0"):
        eval_segments(store, lanes=1, segment_len=1, end_id=None, ext_len=-1)
    with pytest.raises(ConfigError, match="at least 1"):
        eval_segments(store, lanes=0, segment_len=1, end_id=None)
    for options, message in (
        ({"lanes": 0}, "lanes is 0"),
        ({"segment_len": 0}, "segment_len is 0"),
        ({"accumulate": 17}, "accumulate is 17"),
        ({"segment_lengths": "varied", "documents": "separate"}, "differ in length"),
    ):
        with pytest.raises(ConfigError, match=message):
            SegmentSettings(**options)  # type: ignore[arg-type]


def test_batches_move_and_split() -> None:
    feed = SegmentStream(random_store(), SegmentSettings(lanes=5, segment_len=8), 0, end_id=END, ext_len=3)
    batch = feed.whole(0, 1)
    assert batch.num_context == 3
    parts = batch.split(2)
    assert [len(part.lengths) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert sum(part.num_target_tokens() for part in parts) == batch.num_target_tokens() == 40
    assert [len(part.lengths) for part in batch.split(9)] == [1] * 5
    moved = batch.to("meta")
    assert moved.tokens.device.type == "meta"
    assert moved.num_context == 3


@pytest.mark.parametrize("ext_len", [0, 3])
def test_only_the_recent_half_is_learned(ext_len: int) -> None:
    store = store_of([list(range(60))])

    def made(loss_on: Any) -> SegmentStream:
        return SegmentStream(
            store, SegmentSettings(lanes=2, segment_len=7, loss_on=loss_on), 0, end_id=None, ext_len=ext_len
        )

    whole, half = made("all"), made("half")
    assert whole.rows(0) == half.rows(0)
    for row in range(whole.rows(0)):
        full, recent = whole.whole(0, row), half.whole(0, row)
        assert torch.equal(full.tokens, recent.tokens)
        new = full.tokens.shape[1] - full.num_context
        assert recent.num_target_tokens() == 2 * (new - new // 2)
        assert recent.num_context - full.num_context == new // 2
    for wrong in ({"documents": "separate"}, {"mix": ("a=1", "b=1"), "path": "a"}):
        with pytest.raises(ConfigError, match="loss_on"):
            SegmentSettings(loss_on="half", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", range(2, 12))
def test_the_beginning_of_a_text_can_be_scored_with_separate_documents(count: int) -> None:
    """`reading.max_tokens` cuts a document anywhere; none follows it, so its end is not needed."""
    documents = documents_of([3, 0, 4, 2])
    text = [token for document in documents for token in document][:count]
    batches = list(
        eval_segments(store_of(documents).first(count), lanes=1, segment_len=3, end_id=END, documents="separate")
    )
    assert [token for batch in batches for _, targets, _ in rows_of(batch) for token in targets] == text
    wrong = store_of([[1, 2], [3, END]]).first(3)
    with pytest.raises(DataError, match="Document 0 does not end"):
        eval_segments(wrong, lanes=1, segment_len=3, end_id=END, documents="separate")
