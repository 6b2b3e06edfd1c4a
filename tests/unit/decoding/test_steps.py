"""Searches a step at a time: sentences are reported when they end, and those that are dropped change no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyheads.decoding.inputs_and_results import Hypothesis
from manyheads.decoding.search import search_all, search_steps
from manyheads.decoding.settings import DecodingSettings

IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
SOURCES = [[3, 4, 2], [5, 2], [6, 6, 6, 2], [4, 2], [3, 2], [5, 6, 2], [4, 4, 2], [6, 2], [3, 5, 2]]
OPTIONS = [
    {"num_beams": 1},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 1, "do_sample": True, "num_return_sequences": 3, "seed": 4},
]


def steps_of(model: Any, options: dict[str, Any], report_early: bool = True) -> Any:
    source = torch.zeros(len(SOURCES), 4, dtype=torch.int64)
    for row, ids in enumerate(SOURCES):
        source[row, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) for ids in SOURCES])
    settings = DecodingSettings(**options, max_new_tokens=20)
    return search_steps(model, source, lengths, settings, report_early=report_early, **IDS)


def expected(model: Any, options: dict[str, Any]) -> list[list[Hypothesis]]:
    return search_all(model, SOURCES, DecodingSettings(**options, max_new_tokens=20, max_tokens=10**6), **IDS)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("report_early", [False, True])
def test_steps_give_what_the_search_gives(hash_model: Callable[..., Any], options: Any, report_early: bool) -> None:
    model = hash_model(eos_bonus=0.5)
    found: dict[int, list[Hypothesis]] = {}
    for number, finished in enumerate(steps_of(model, options, report_early), 1):
        for sentence, hypotheses in finished:
            assert sentence not in found, "reported twice"
            found[sentence] = hypotheses
            if report_early and not options.get("do_sample"):
                longest = max(len(one.ids) + one.ended for one in hypotheses)
                assert longest <= number, "from the future"
    assert [found[sentence] for sentence in range(len(SOURCES))] == expected(model, options)


def test_greedy_sentences_are_reported_in_the_step_that_ends_them(hash_model: Callable[..., Any]) -> None:
    for number, finished in enumerate(steps_of(hash_model(eos_bonus=0.5), OPTIONS[0]), 1):
        assert all(len(hypotheses[0].token_log_probs) == number for _, hypotheses in finished)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("step", [1, 2, 4])
def test_dropped_sentences_leave_at_once_and_change_no_others(hash_model, options, step):
    model = hash_model(eos_bonus=-2.0)
    dropped = {1, 4, 8}
    found: dict[int, list[Hypothesis]] = {}
    steps = steps_of(model, options)
    for _ in range(step):
        found.update(next(steps))
    running = set(range(len(SOURCES))) - found.keys() - dropped
    try:
        found.update(steps.send(dropped))
        rows = model.steps[-1][0]
        each = options["num_return_sequences"] if options.get("do_sample") else options["num_beams"]
        assert rows == len(running) * each
        while True:
            found.update(next(steps))
    except StopIteration:
        pass
    wanted = expected(hash_model(eos_bonus=-2.0), options)
    for sentence in set(range(len(SOURCES))) - dropped:
        assert found[sentence] == wanted[sentence]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_search_ends_when_all_are_dropped(hash_model: Callable[..., Any], options: Any) -> None:
    steps = steps_of(hash_model(eos_bonus=-9.0), options)
    next(steps)
    with pytest.raises(StopIteration):
        steps.send(range(len(SOURCES)))
