"""Greedy search and sampling."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.decoding import search_problem
from manyheads.decoding.greedy_and_sampling import draw
from manyheads.decoding.inputs_and_results import SearchStopped, cut_batches
from manyheads.decoding.search import search_all
from manyheads.decoding.settings import DecodingSettings, check_ids
from manyheads.errors import NonFiniteError, RequestError
from manyheads.nn.kernels.topk import highest, top_k

IDS: dict[str, int] = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
SOURCES = [[3 + (i * j) % 4 for j in range(1 + i % 4)] + [2] for i in range(10)]
GREEDY = DecodingSettings(num_beams=1, max_new_tokens=10)
SAMPLE = replace(GREEDY, do_sample=True)


@pytest.mark.parametrize("leave_at", [1, 8])
def test_greedy_follows_the_argmax(hash_model: Any, leave_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_problem, "_LEAVE_AT", leave_at)
    model = hash_model(vocab_size=11, seed=1, eos_bonus=1.0)
    for ids, (found,) in zip(SOURCES, search_all(model, SOURCES, GREEDY, **IDS), strict=True):
        compute, target, log_probs = model.next_log_probs(ids), [1], []
        while len(target) <= 10 and target[-1] != 2:
            row = compute(target)
            row[0] = row[1] = -math.inf
            best = max(range(len(row)), key=row.__getitem__)
            target.append(best)
            log_probs.append(row[best])
        assert found.ended == (target[-1] == 2)
        assert found.ids == target[1:-1] if found.ended else target[1:]
        assert found.token_log_probs == pytest.approx(log_probs, abs=1e-5)
        assert found.score == pytest.approx(sum(log_probs) / ((5 + len(log_probs)) / 6) ** 0.6, abs=1e-5)


@pytest.mark.parametrize("leave_at", [1, 8])
@pytest.mark.parametrize("paths", [1, 3])
def test_samples_belong_to_the_sentence(hash_model, paths, leave_at, monkeypatch):
    """Batch, order, batch size and when those that are done leave change nothing; seed and place in the input do."""
    monkeypatch.setattr(search_problem, "_LEAVE_AT", leave_at)
    model = hash_model(vocab_size=11, seed=1)
    options = replace(SAMPLE, num_return_sequences=paths, seed=5, top_p=0.9)
    together = search_all(model, SOURCES, options, **IDS)
    assert together == search_all(model, SOURCES, replace(options, max_tokens=7), **IDS)
    for place in (0, 4, 9):
        assert search_all(model, [SOURCES[place]], options, indices=[place], **IDS) == [together[place]]
    assert together != search_all(model, SOURCES, replace(options, seed=6), **IDS)
    same_text = search_all(model, [SOURCES[3]] * 6, options, **IDS)
    assert len({tuple(hypotheses[0].ids) for hypotheses in same_text}) > 2
    if paths > 1:
        assert any(hypotheses[0].ids != hypotheses[1].ids for hypotheses in together)
        assert all(len(h) == 3 and h[0].score >= h[1].score >= h[2].score for h in together)


def test_sampled_log_probs_are_the_models(hash_model: Any) -> None:
    model = hash_model(vocab_size=11, seed=1)
    options = replace(SAMPLE, temperature=2.0, top_k=5, num_return_sequences=2)
    for ids, hypotheses in zip(SOURCES, search_all(model, SOURCES, options, **IDS), strict=True):
        for found in hypotheses:
            target = [1, *found.ids, *([2] if found.ended else [])]
            compute = model.next_log_probs(ids)
            expected = [compute(target[:i])[target[i]] for i in range(1, len(target))]
            assert found.token_log_probs == pytest.approx(expected, abs=1e-5)


def test_draw_has_the_right_frequencies() -> None:
    count = 40_000
    probs = torch.tensor([0.0, 0.5, 0.25, 0.15, 0.1])
    rows, numbers = probs.log().expand(count, -1), torch.rand(count, generator=torch.Generator().manual_seed(0))
    cases = {
        (1.0, 0, 1.0): probs,
        (0.5, 0, 1.0): probs**2 / (probs**2).sum(),
        (1.0, 2, 1.0): torch.tensor([0, 2 / 3, 1 / 3, 0, 0]),
        (1.0, 0, 0.7): torch.tensor([0, 2 / 3, 1 / 3, 0, 0]),
        (1.0, 0, 0.76): torch.tensor([0, 50 / 90, 25 / 90, 15 / 90, 0]),
        (1.0, 3, 0.5): torch.tensor([0, 1.0, 0, 0, 0]),
        (1.0, 0, 1e-9): torch.tensor([0, 1.0, 0, 0, 0]),
        (1.0, 99, 1.0): probs,
    }
    for options, expected in cases.items():
        drawn = draw(rows, numbers, *options).bincount(minlength=5) / count
        assert (drawn - expected).abs().max() < 0.01, options
        assert (drawn[expected == 0] == 0).all(), options


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 6), st.floats(0.01, 1), st.sampled_from([0.0, 1.0, 1 - 2**-24]))
def test_draw_never_takes_what_is_forbidden(seed: int, top_k: int, top_p: float, number: float) -> None:
    """Not even when the random number is at the end of its range."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(8, 12, generator=generator).mul(5).log_softmax(-1)
    log_probs[torch.rand(8, 12, generator=generator) < 0.5] = -math.inf
    log_probs[:, 5] = -1.0
    drawn = draw(log_probs, torch.full((8,), number), 1.0, top_k, top_p)
    assert log_probs.gather(1, drawn[:, None]).isfinite().all()


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 10.0])
def test_wide_nucleus_is_the_sorted_one(sharpness: float) -> None:
    """However many tokens must be looked at, the draw is from the same set."""
    generator = torch.Generator().manual_seed(0)
    log_probs = (torch.randn(40, 3000, generator=generator) * sharpness).log_softmax(-1)
    numbers = torch.rand(40, generator=generator)
    for top_p in (0.3, 0.9, 0.999):
        ordered, ids = log_probs.exp().double().sort(-1, descending=True)
        kept = ordered * ((ordered.cumsum(-1) - ordered) < top_p)
        cumulative = kept.cumsum(-1)
        place = (cumulative <= numbers[:, None] * cumulative[:, -1:]).sum(-1, keepdim=True)
        drawn = draw(log_probs, numbers, 1.0, 0, top_p)
        assert (drawn == ids.gather(1, place)[:, 0]).float().mean() > 0.9  # rounding may move a draw to its neighbour
        assert (log_probs.exp().gather(1, drawn[:, None]) >= kept.where(kept > 0, 2.0).amin(-1, True) * 0.99).all()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 3000), st.integers(1, 12), st.booleans())
def test_top_k_is_topk(seed: int, size: int, count: int, forbidden: bool) -> None:
    values = torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    if forbidden:
        values[:, ::2] = -math.inf
    count = min(count, size)
    found, places = top_k(values, count)
    assert torch.equal(found, values.topk(count).values)
    assert torch.equal(values.gather(1, places), found)
    assert all(len(set(row)) == count for row in places.tolist())
    values[1, size // 2] = math.nan
    assert top_k(values, count)[0][1, 0].isnan()


def test_search_stops_when_asked(hash_model: Any) -> None:
    for options in (GREEDY, replace(GREEDY, num_beams=3)):
        model, answers = hash_model(vocab_size=11), iter([False, False, True])
        with pytest.raises(SearchStopped):
            search_all(model, SOURCES, options, stop=lambda answers=answers: next(answers), **IDS)
        assert len(model.steps) == 2


def test_nan_is_an_error(hash_model: Any) -> None:
    class Broken(hash_model):  # type: ignore[misc]
        def step(self, tokens: Any, state: Any) -> Any:
            log_probs, state = super().step(tokens, state)
            return log_probs * math.nan if len(self.steps) == 3 else log_probs, state

    for options in (GREEDY, replace(GREEDY, num_beams=3), SAMPLE):
        with pytest.raises(NonFiniteError, match="target token 3"):
            search_all(Broken(vocab_size=11, eos_bonus=-9), SOURCES, options, **IDS)


def test_a_banned_eos_is_never_produced_where_it_is_the_start_token(hash_model: Any) -> None:
    """fairseq's models begin with EOS."""
    options = DecodingSettings(num_beams=1, max_new_tokens=6, banned_ids=(2,))
    [[found]] = search_all(hash_model(eos_bonus=9.0), [[3, 2]], options, pad_id=0, bos_id=2, eos_id=2)
    assert len(found.ids) == 6
    assert not found.ended


def test_no_sentences(hash_model: Any) -> None:
    assert search_all(hash_model(), [], GREEDY, **IDS) == []


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 300), st.integers(1, 5))
def test_batches_hold_the_budget(lengths: list[int], budget: int, rows: int) -> None:
    batches = cut_batches(lengths, budget, rows)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[place] for place in batch)
        assert len(batch) == 1 or longest * len(batch) * rows <= budget
    ordered = [lengths[place] for batch in batches for place in batch]
    assert ordered == sorted(lengths, reverse=True)


def test_ids_that_cannot_be_are_refused() -> None:
    def check(**options: Any) -> None:
        check_ids(DecodingSettings(**options), vocab_size=9, pad_id=0, eos_id=2)

    check(banned_ids=(8,), forced_prefix_ids=(3, 4), max_new_tokens=3)
    for options, message in (
        ({"banned_ids": (9,)}, "ids of this vocabulary are 0 to 8"),
        ({"forced_prefix_ids": (-1,)}, "ids of this vocabulary"),
        ({"forced_prefix_ids": (3, 2)}, "holds 2, which is padding, EOS or banned"),
        ({"forced_prefix_ids": (3,), "banned_ids": (3,)}, "holds 3, which is"),
        ({"forced_prefix_ids": (3, 4), "max_new_tokens": 2}, "raise max_new_tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            check(**options)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.sampled_from([3, 64, 1000, 1024, 4099]), st.integers(0, 2**31), st.booleans())
def test_the_likeliest_is_the_argmax(rows: int, size: int, seed: int, has_ties: bool) -> None:
    values = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    if has_ties:
        values = values.round()
    largest, places = highest(values)
    assert torch.equal(places, values.argmax(-1, keepdim=True))
    assert torch.equal(largest, values.amax(-1, keepdim=True))
    values[0, seed % size] = math.nan
    assert highest(values)[1][0] == seed % size


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 6), st.integers(1, 5), st.sampled_from([9, 128, 1000, 4099]), st.integers(1, 10), st.integers(0, 99)
)
def test_the_largest_of_a_group_of_rows(groups: int, each: int, size: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(groups * each, size, generator=generator)
    added = torch.randn(groups, each, generator=generator)
    added[0, seed % each] = -math.inf if each > 1 else 0.0
    count = min(count, size)
    largest, places = top_k(values, count, added)
    pool = (values.view(groups, each, size) + added[:, :, None]).flatten(1)
    assert torch.equal(largest, pool.topk(count).values)
    assert torch.equal(largest, pool.gather(1, places))
    assert all(len(set(row)) == count for row in places.tolist())
    values[0, size // 2] = math.nan
    assert top_k(values, count, added)[0][0, 0].isnan()


def test_the_largest_of_no_rows() -> None:
    assert [one.shape for one in top_k(torch.zeros(0, 1000), 3)] == [(0, 3)] * 2
