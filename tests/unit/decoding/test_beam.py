"""Beam search against its oracle, and against the definition of what it approximates."""

import itertools
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_search import naive_beam_search

from manyheads.decoding import search_problem
from manyheads.decoding.inputs_and_results import Hypothesis
from manyheads.decoding.search import beam_search_steps, search_all, search_steps
from manyheads.decoding.search_problem import BeamRules, SearchProblem, length_limits, run_to_end
from manyheads.decoding.settings import DecodingSettings
from manyheads.nn.kernels import policy

IDS: dict[str, int] = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
modest = settings(deadline=None, max_examples=75, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
fewer = settings(modest, max_examples=40)


def same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [h.ids for h in found] == [h.ids for h in expected]
    assert [h.ended for h in found] == [h.ended for h in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-5)


def beam_only(model: Any, sources: list[list[int]], options: DecodingSettings) -> list[list[Hypothesis]]:
    """Beam search proper, also with one beam (where `search_steps` takes the greedy path)."""
    width = max(len(ids) for ids in sources)
    source = torch.tensor([ids + [0] * (width - len(ids)) for ids in sources])
    lengths = torch.tensor([len(ids) for ids in sources])
    limits = length_limits(lengths, options)
    rules = BeamRules(options)
    problem = SearchProblem(
        model=model, source=source, source_lengths=lengths, limits=limits, indices=range(len(sources)),
        settings=options, rules=rules, **IDS,
    )  # fmt: skip
    return run_to_end(beam_search_steps(problem))


@st.composite
def some_options(draw: st.DrawFn) -> DecodingSettings:
    num_beams = draw(st.integers(1, 6))
    prefix = tuple(draw(st.lists(st.integers(3, 5), max_size=2)))
    explicit = draw(st.booleans())
    limit = draw(st.integers(len(prefix) + 1, 9))
    return DecodingSettings(
        num_beams=num_beams,
        num_return_sequences=draw(st.integers(1, num_beams)),
        length_penalty=draw(st.sampled_from([0.0, 0.6, 1.0, 2.5])),
        length_penalty_kind=draw(st.sampled_from(["gnmt", "power", "none"])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
        max_new_tokens=limit if explicit else 0,
        max_len_ratio=draw(st.sampled_from([0.0, 0.5, 1.5])),
        max_len_offset=draw(st.integers(0, 4)),
        min_new_tokens=draw(st.integers(0, limit if explicit else 4)),
        no_repeat_ngram_size=draw(st.integers(0, 3)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        banned_ids=tuple(draw(st.lists(st.just(6), max_size=1))),
        forced_prefix_ids=prefix,
        forced_eos=draw(st.booleans()),
        renormalize_logits=draw(st.booleans()),
    )


some_sources = st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=6), min_size=1, max_size=5)


@modest
@given(
    some_options(),
    some_sources,
    st.integers(0, 10**6),
    st.integers(4, 9),
    st.sampled_from([-2.0, 0.0, 2.0, 5.0]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 3, 8]),
)
def test_beam_equals_oracle(hash_model, options, sources, seed, vocab, bonus, leave_at, read_every):
    """Also where sentences that are done wait until half of the batch is, or all of it, and some steps are not read."""
    vocab = max([vocab, *(i + 1 for i in (*options.banned_ids, *options.forced_prefix_ids))])
    model = hash_model(vocab_size=vocab, seed=seed, eos_bonus=bonus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_problem, "_LEAVE_AT", leave_at)
        patch.setattr(policy, "steps_between_reads", lambda device: read_every)
        found = beam_only(model, sources, options)
    limits = length_limits(torch.tensor([len(ids) for ids in sources]), options).tolist()
    for ids, limit, hypotheses in zip(sources, limits, found, strict=True):
        same(hypotheses, naive_beam_search(model.next_log_probs(ids), options, limit=limit, **IDS))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_beams", [2, 3, 5])
def test_whole_nbest_list_equals_oracle(hash_model: Any, num_beams: int) -> None:
    """With EOS likely, so that a row's best candidates are not all allowed to go on."""
    options = DecodingSettings(num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=7)
    for seed in range(30):
        model = hash_model(vocab_size=9, seed=seed, eos_bonus=2.0)
        (found,) = search_all(model, [[3, 4, 2]], options, **IDS)
        same(found, naive_beam_search(model.next_log_probs([3, 4, 2]), options, limit=7, **IDS))


@fewer
@given(some_options(), some_sources, st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_result_does_not_depend_on_the_batch(hash_model, options, sources, seed, random):
    model = hash_model(seed=seed)
    together = search_all(model, sources, options, **IDS)
    order = list(range(len(sources)))
    random.shuffle(order)
    shuffled = search_all(model, [sources[i] for i in order], replace(options, max_tokens=20), **IDS)
    for place, i in enumerate(order):
        same(shuffled[place], together[i])
        same(search_all(model, [sources[i]], options, **IDS)[0], together[i])


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(["gnmt", "power", "none"]), st.sampled_from([0.6, 1.0, 2.0]))
def test_exhaustive_width_finds_the_best_of_all(hash_model: Any, seed: int, kind: Any, exponent: float) -> None:
    limit, words = 4, [3, 4, 5]
    model = hash_model(vocab_size=6, seed=seed)
    options = DecodingSettings(
        num_beams=len(words) ** limit,
        num_return_sequences=5,
        length_penalty=exponent,
        length_penalty_kind=kind,
        max_new_tokens=limit,
    )
    next_log_probs = model.next_log_probs([3, 4, 2])
    scored = []
    for size in range(limit):
        for ids in itertools.product(words, repeat=size):
            sequence = [1, *ids, 2]
            total = sum(next_log_probs(sequence[:i])[sequence[i]] for i in range(1, len(sequence)))
            length = size + 1
            penalty = {"gnmt": ((5 + length) / 6) ** exponent, "power": length**exponent, "none": 1.0}[kind]
            scored.append((total / penalty, list(ids)))
    scored.sort(reverse=True)
    (found,) = search_all(model, [[3, 4, 2]], options, **IDS)
    assert [h.ids for h in found] == [ids for _, ids in scored[:5]]
    assert [h.score for h in found] == pytest.approx([score for score, _ in scored[:5]], abs=1e-5)


@fewer
@given(some_options(), some_sources, st.integers(0, 10**6))
def test_one_beam_is_greedy(hash_model, options, sources, seed):
    # The penalty of repetition acts on logits in greedy search, on log-probabilities in a beam.
    options = replace(options, num_beams=1, num_return_sequences=1, early_stopping=True, repetition_penalty=1.0)
    model = hash_model(seed=seed)
    greedy = search_all(model, sources, options, **IDS)
    for one, other in zip(greedy, beam_only(model, sources, options), strict=True):
        same(one, other)


def test_finished_sentences_leave_the_batch(hash_model: Any) -> None:
    model = hash_model(vocab_size=9, seed=3, eos_bonus=2.0)
    sources = [[3 + (i + j) % 6 for j in range(2 + i % 5)] for i in range(12)]
    options = DecodingSettings(num_beams=3, max_new_tokens=12)
    batch = search_all(model, sources, options, **IDS)
    counts = [sentences for sentences, _ in model.reorders]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < 12
    assert model.steps[0] == (12, 1)
    assert [rows for rows, _ in model.steps[1:]] == [sentences * beams for sentences, beams in model.reorders]
    assert len(batch) == 12


@pytest.mark.parametrize("num_beams", [1, 3])
def test_finished_sentences_leave_together(hash_model: Any, num_beams: int) -> None:
    """An eighth of the batch at a time, so that memory is seldom copied; what is found is as alone."""
    sources = [[3 + (i * j) % 6 for j in range(1 + i % 7)] for i in range(64)]
    options = DecodingSettings(num_beams=num_beams, max_len_ratio=1.0, max_len_offset=3, max_tokens=10**6)
    model = hash_model(vocab_size=9, seed=3, eos_bonus=1.0)
    batch = search_all(model, sources, options, **IDS)
    rows = [64, *(each // num_beams for each, _ in model.steps[1:])]
    changes = [(before, after) for before, after in pairwise(rows) if before != after]
    assert 1 < len(changes) <= 24
    assert all(before - after >= before / 8 for before, after in changes)
    for ids, found in zip(sources, batch, strict=True):
        same(found, search_all(model, [ids], options, **IDS)[0])


def test_who_waits_to_leave_is_not_asked_again(hash_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One word and EOS are all there is, so sentences with little room find fewer hypotheses than are asked for."""
    monkeypatch.setattr(search_problem, "_LEAVE_AT", 1)
    model = hash_model(vocab_size=4, seed=1, eos_bonus=-1.0)
    options = DecodingSettings(num_beams=4, num_return_sequences=4, max_len_ratio=1.0, max_len_offset=0)
    sources = [[3] * length for length in (1, 2, 3, 9)]
    for ids, found in zip(sources, search_all(model, sources, options, **IDS), strict=True):
        assert len({tuple(one.ids) for one in found}) == len(found) <= len(ids) + 1
        same(found, search_all(model, [ids], options, **IDS)[0])


def test_stopping_saves_steps_but_never_a_better_hypothesis(hash_model: Any) -> None:
    saved = 0
    for seed in range(30):
        model = hash_model(seed=seed, eos_bonus=1.0)
        options = DecodingSettings(num_beams=4, max_new_tokens=15, num_return_sequences=2)
        (found,) = beam_only(model, [[3, 4, 5]], options)
        saved += 15 - len(model.steps)
        same(found, naive_beam_search(model.next_log_probs([3, 4, 5]), options, limit=15, **IDS))
    assert saved > 30


def test_forced_prefix_is_fed_in_one_step(hash_model: Any) -> None:
    model = hash_model(vocab_size=9)
    options = DecodingSettings(forced_prefix_ids=(5, 6, 7), max_new_tokens=8)
    (found,) = search_all(model, [[3, 2]], options, **IDS)
    assert model.steps[0] == (1, 4)
    assert found[0].ids[:3] == [5, 6, 7]
    assert found[0].token_log_probs[:3] == [0.0, 0.0, 0.0]
    assert len(found[0].token_log_probs) == len(found[0].ids) + found[0].ended


def test_cut_hypotheses_come_after_ended_ones(hash_model: Any) -> None:
    model = hash_model(vocab_size=9, seed=5, eos_bonus=-30.0)
    options = DecodingSettings(num_beams=3, num_return_sequences=3, max_new_tokens=4)
    (found,) = search_all(model, [[3, 2]], options, **IDS)
    assert [(len(h.ids), h.ended) for h in found] == [(4, False)] * 3
    assert found[0].score >= found[1].score >= found[2].score
    assert found[0].score == pytest.approx(found[0].sum_log_prob / (9 / 6) ** 0.6, abs=1e-5)


def test_nothing_allowed_gives_what_there_was(hash_model: Any) -> None:
    options = DecodingSettings(num_beams=2, banned_ids=(4,), no_repeat_ngram_size=1, min_new_tokens=8, max_new_tokens=8)
    for beams in (1, 2):
        (found,) = search_all(hash_model(vocab_size=5), [[3, 2]], replace(options, num_beams=beams), **IDS)
        assert [(h.ids, h.ended) for h in found] == [([3], False)]


def test_length_limits() -> None:
    lengths = torch.tensor([1, 4, 10])
    assert length_limits(lengths, DecodingSettings(max_len_ratio=1.5, max_len_offset=2)).tolist() == [3, 8, 17]
    assert length_limits(lengths, DecodingSettings(max_new_tokens=5)).tolist() == [5, 5, 5]
    assert length_limits(lengths, DecodingSettings(max_len_ratio=0, max_len_offset=0)).tolist() == [1, 1, 1]
    assert length_limits(lengths, DecodingSettings(), max_len=55).tolist() == [51, 54, 55]
    assert length_limits(lengths, DecodingSettings(max_len_offset=0, min_new_tokens=6)).tolist() == [7, 7, 10]


def test_bound_is_attained_and_never_passed() -> None:
    """Whatever sum <= s and length <= limit a running hypothesis ends with, it scores at most s / penalty(limit)."""
    for kind, exponent in itertools.product(("gnmt", "power", "none"), (0.0, 0.6, 2.0)):
        rules = BeamRules(DecodingSettings(length_penalty_kind=kind, length_penalty=exponent, num_beams=1))  # type: ignore[arg-type]
        bound = -3.0 / float(rules.penalty(torch.tensor(9)))
        reached = [float(rules.score(torch.tensor(-3.0 - more), n)) for n in range(4, 10) for more in (0.0, 0.5)]
        assert max(reached) == pytest.approx(bound)
        sums = torch.tensor([-3.0, -3.0])
        done = rules.finished(torch.tensor([[bound - 1e-3], [bound + 1e-3]]), sums, sums, 3, torch.tensor([9, 9]))
        assert done.tolist() == [False, True]


def test_other_rules_fit_in_without_touching_the_search(hash_model: Any) -> None:
    """A free EOS forced at the last position, as some converted models want it."""

    class FreeEos(BeamRules):
        def last_step(self, log_probs: torch.Tensor, at_limit: torch.Tensor, eos_id: int) -> None:
            log_probs[at_limit] = -math.inf
            log_probs[..., eos_id].masked_fill_(at_limit[:, None], 0.0)

    model = hash_model(vocab_size=9, seed=5, eos_bonus=-30.0)
    options = DecodingSettings(num_beams=3, num_return_sequences=3, max_new_tokens=4)
    rules = FreeEos(replace(options, length_penalty_kind="power", length_penalty=1.0))
    steps = search_steps(model, torch.tensor([[3, 2]]), torch.tensor([2]), options, rules=rules, **IDS)
    (found,) = run_to_end(steps)
    assert [(len(h.ids), h.ended, h.token_log_probs[-1]) for h in found] == [(3, True, 0.0)] * 3
    assert found[0].score == pytest.approx(sum(found[0].token_log_probs) / 4, abs=1e-5)
