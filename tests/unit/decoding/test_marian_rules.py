"""Marian's rules against their oracle, and each habit by itself."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_search import naive_beam_search, naive_marian_search

from manyheads.decoding.inputs_and_results import Hypothesis
from manyheads.decoding.search import search_all
from manyheads.decoding.search_problem import Marian5Rules, MarianRules
from manyheads.decoding.settings import DecodingSettings

# As Marian has them: EOS first, padding last and given to the decoder first.
PAD, EOS = 6, 0
IDS = {"pad_id": PAD, "bos_id": PAD, "eos_id": EOS}


def same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(h.ids, h.ended) for h in found] == [(h.ids, h.ended) for h in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-5)


@st.composite
def some_options(draw: st.DrawFn) -> DecodingSettings:
    num_beams = draw(st.integers(2, 5))
    limit = draw(st.integers(2, 9))
    return DecodingSettings(
        rules=draw(st.sampled_from(["marian", "marian-5"])),
        num_beams=num_beams,
        num_return_sequences=draw(st.integers(1, num_beams)),
        length_penalty=draw(st.sampled_from([1.0, 0.6, 0.0, -0.5, 2.0])),
        length_penalty_kind="power",
        early_stopping=draw(st.sampled_from([True, False, "never"])),
        max_new_tokens=limit,
        min_new_tokens=draw(st.integers(0, min(3, limit))),
        forced_eos=draw(st.sampled_from([True, True, False])),
        renormalize_logits=draw(st.booleans()),
        no_repeat_ngram_size=draw(st.sampled_from([0, 0, 2])),
        banned_ids=draw(st.sampled_from([(), (5,)])),
        forced_prefix_ids=draw(st.sampled_from([(), (), (3,)])),
    )


@settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    some_options(),
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 10**6),
)
def test_search_equals_oracle(hash_model: Any, options: DecodingSettings, sources: list[list[int]], seed: int) -> None:
    model = hash_model(vocab_size=7, seed=seed)
    found = search_all(model, sources, options, **IDS)
    for ids, hypotheses in zip(sources, found, strict=True):
        expected = naive_marian_search(model.next_log_probs(ids), options, limit=options.max_new_tokens, **IDS)
        if expected:
            same(hypotheses, expected)
        else:  # nothing was allowed at all: we return what there was
            assert not hypotheses[0].ended


def test_the_guess_looks_at_what_was_found_and_counts_the_start() -> None:
    """Kept hypotheses of -0.5 and -1; the best of step 3 has a sum of -4.1, the best that goes on one of -4.4."""
    kept, limits = torch.tensor([[-0.5, -1.05]]), torch.tensor([9])
    found, running = torch.tensor([-4.1]), torch.tensor([-4.4])
    common = DecodingSettings(length_penalty_kind="power", length_penalty=1.0, num_beams=2)

    def done(rules: type[MarianRules], early_stopping: Any, kept: torch.Tensor = kept) -> bool:
        return bool(rules(replace(common, early_stopping=early_stopping)).finished(kept, found, running, 3, limits))

    assert not done(MarianRules, False)  # -4.1 / 4 = -1.025 would be better than -1.05
    assert done(Marian5Rules, False)  # -4.4 / 3 = -1.47 would not
    assert not done(MarianRules, "never")
    assert not done(Marian5Rules, "never")  # -4.4 / 9 would
    assert done(MarianRules, True)
    assert not done(MarianRules, True, torch.tensor([[-0.5, -math.inf]]))
    assert not done(MarianRules, False, torch.tensor([[-0.5, -math.inf]]))


def test_the_guess_may_lose_what_never_finds(hash_model: Any) -> None:
    """A sure way on costs nothing and makes a score better, which the guess does not foresee; `never` is exact."""
    lost = 0
    for seed in range(10):
        model = hash_model(vocab_size=7, seed=seed, sharpness=10.0)
        options = DecodingSettings(
            rules="marian",
            num_beams=2,
            length_penalty=1.0,
            length_penalty_kind="power",
            max_new_tokens=10,
            forced_eos=True,
            early_stopping="never",
        )
        (exact,) = search_all(model, [[3, 4]], options, **IDS)
        (guessed,) = search_all(model, [[3, 4]], replace(options, early_stopping=False), **IDS)
        (ours,) = search_all(model, [[3, 4]], replace(options, rules="manyheads"), **IDS)
        same(exact, ours)
        lost += guessed[0].score < exact[0].score - 1e-6
    assert lost > 0


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("rules", ["manyheads", "marian"])
def test_a_forced_eos_costs_nothing(hash_model: Any, num_beams: int, rules: Any) -> None:
    model = hash_model(vocab_size=7, seed=5)
    options = DecodingSettings(
        rules=rules, num_beams=num_beams, max_new_tokens=4, min_new_tokens=3, forced_eos=True, early_stopping=True
    )
    (found,) = search_all(model, [[3, 2]], options, **IDS)
    assert (len(found[0].ids), found[0].ended, found[0].token_log_probs[-1]) == (3, True, 0.0)
    sampled = replace(options, num_beams=1, do_sample=True, num_return_sequences=3, repetition_penalty=1.2)
    (drawn,) = search_all(model, [[3, 2]], sampled, **IDS)
    assert [(len(h.ids), h.ended, h.token_log_probs[-1]) for h in drawn] == [(3, True, 0.0)] * 3


def test_what_is_left_is_made_probabilities_again(hash_model: Any) -> None:
    """Two tokens and EOS are left: their probabilities are those of the model, divided by their sum."""
    model = hash_model(vocab_size=7, seed=2)
    options = DecodingSettings(
        num_beams=3, num_return_sequences=3, max_new_tokens=1, banned_ids=(1, 2, 3), renormalize_logits=True
    )
    (found,) = search_all(model, [[3, 2]], options, **IDS)
    plain = model.next_log_probs([3, 2])([PAD])
    left = [EOS, 4, 5]
    total = math.log(sum(math.exp(plain[token]) for token in left))
    scores = {tuple(h.ids): h.score for h in found}
    assert scores == pytest.approx({(): plain[EOS] - total, (4,): plain[4] - total, (5,): plain[5] - total}, abs=1e-5)
    own = {tuple(h.ids): h.token_log_probs[-1] for h in found}
    assert own == pytest.approx({(): plain[EOS], (4,): plain[4], (5,): plain[5]}, abs=1e-5)


def test_cut_hypotheses_compete(hash_model: Any) -> None:
    """Without a forced EOS, one that was cut may come first; its length counts the start, and no EOS is taken off."""
    options = DecodingSettings(
        rules="marian", num_beams=3, num_return_sequences=3, max_new_tokens=3, length_penalty_kind="power",
        length_penalty=1.0, early_stopping="never",
    )  # fmt: skip
    firsts = set()
    for seed in range(30):
        model = hash_model(vocab_size=7, seed=seed)
        (found,) = search_all(model, [[3, 2]], options, **IDS)
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        firsts.add(found[0].ended)
        for h in found:
            assert h.score == pytest.approx(h.sum_log_prob / (len(h.ids) + 1), abs=1e-5)
        five = replace(options, rules="marian-5")
        (found,) = search_all(model, [[3, 2]], five, **IDS)
        for h in found:
            assert h.score == pytest.approx(h.sum_log_prob / (len(h.ids) + h.ended), abs=1e-5)
    assert firsts == {True, False}


def test_our_rules_with_a_forced_eos_equal_their_oracle(hash_model: Any) -> None:
    options = DecodingSettings(num_beams=4, num_return_sequences=4, max_new_tokens=6, forced_eos=True)
    for seed in range(10):
        model = hash_model(vocab_size=7, seed=seed)
        (found,) = search_all(model, [[3, 4, 2]], options, **IDS)
        same(found, naive_beam_search(model.next_log_probs([3, 4, 2]), options, limit=6, **IDS))
