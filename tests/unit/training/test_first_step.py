"""The times that `train --dry-run` reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manyheads.training.plan import planner
from manyheads.training.run.step import StepResult


def fake_steps(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> tuple[Any, list[int]]:
    """Return an assembly whose steps take these seconds, twice that of processor time, and their micro-batches."""
    now, taken = 0.0, []

    def take(batches: list[Any], step: int, rate: float) -> StepResult:
        nonlocal now
        assert rate == 0.0
        now += seconds[len(taken)]
        taken.append(len(batches))
        num_tokens = sum(batch.num_target_tokens() for batch in batches)
        return StepResult(loss_sum=3.0 * num_tokens, nll_sum=3.0 * num_tokens, num_tokens=num_tokens, grad_norm=1.0)

    clock = SimpleNamespace(monotonic=lambda: now, process_time=lambda: 2 * now)
    monkeypatch.setattr(planner, "time", clock)
    memory = SimpleNamespace(forget=lambda: None)
    return SimpleNamespace(stepper=lambda: SimpleNamespace(take=take), memory=memory), taken


def micro_batches(*counts: int) -> list[Any]:
    return [SimpleNamespace(num_target_tokens=lambda count=count: count) for count in counts]


def test_a_quick_step_is_computed_whole_and_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly, taken = fake_steps(monkeypatch, [2.0, 1.0, 0.3, 0.2, 0.5])
    result, num_measured, times = planner._measure(assembly, micro_batches(10, 20, 30))
    assert taken == [1, 3, 3, 3, 3]
    assert (result.num_tokens, num_measured) == (60, 3)
    assert times == pytest.approx((0.3, 0.6))


def test_of_a_long_step_one_micro_batch_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly, taken = fake_steps(monkeypatch, [25.0, 20.0])
    result, num_measured, times = planner._measure(assembly, micro_batches(10, 20, 30))
    assert taken == [1, 1]
    assert (result.num_tokens, num_measured) == (10, 1)
    assert times == pytest.approx((120.0, 240.0)), "20 s for 10 of 60 target tokens"


def test_a_very_long_micro_batch_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for counts in ((10,), (10, 30)):
        assembly, taken = fake_steps(monkeypatch, [100.0])
        _, num_measured, times = planner._measure(assembly, micro_batches(*counts))
        assert taken == [1]
        assert num_measured == 1
        assert times == pytest.approx((10.0 * sum(counts), 20.0 * sum(counts)))
