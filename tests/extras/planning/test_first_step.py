"""`train --dry-run`: how much of a step it computes, and the times that it reports."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from manyheads.catalogue import PRESETS
from manyheads.extras.planning import first_step
from manyheads.extras.planning.first_step import FirstStep
from manyheads.training.run.objective import Batch
from manyheads.training.run.step import StepResult, TrainStep
from manyheads.training.settings import RunConfig

SLOW = 0.01
"""Seconds a target token of the slow machine."""


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps take 1 s and `SLOW` for each target token, by a clock of their own. Returns: target tokens of each step."""
    now, taken = 0.0, []
    take = TrainStep.run

    def counting(train_step: TrainStep, batches: Sequence[Batch], step: int, learning_rate: float) -> StepResult:
        nonlocal now
        assert learning_rate == 0.0
        result = take(train_step, batches, step, learning_rate)
        now += 1.0 + SLOW * result.num_tokens
        taken.append(result.num_tokens)
        return result

    monkeypatch.setattr(TrainStep, "run", counting)
    clock = SimpleNamespace(monotonic=lambda: now, process_time=lambda: 2 * now)
    monkeypatch.setattr(first_step, "time", clock)
    return taken


def dry(preset: str, tmp_path: Any) -> FirstStep:
    config: RunConfig = PRESETS[preset]()
    return first_step.first_step(replace(config, run_dir=str(tmp_path / "run")))


def test_a_small_step_is_computed_whole(slow_machine: list[int], tmp_path: Any) -> None:
    found = dry("xl-debug", tmp_path)
    assert slow_machine == [64, 64], "one step to begin with, and one that takes over a second"
    assert found.num_measured == len(found.batch) == 2
    assert found.step_seconds == pytest.approx(1.64)
    assert found.processor_seconds == pytest.approx(3.28)
    assert "one step: 1.64 s, 3.28 s of processor time, loss " in found.describe()
    assert "MiB at the peak of one step" in found.describe()
    assert "\nfirst step: 2 micro-batches of 2 lanes of 16 tokens; " in found.describe()


@pytest.mark.parametrize(
    ("longest", "computed", "text"),
    [
        (10.0, [64, 64], "(nothing was saved)"),
        (1.0, [32, 32], "(only the first of 2 micro-batches was computed, because the step takes more than 1 s; "),
        (0.1, [], "(expected from short steps and not computed, because it takes more than 0 s; nothing was saved)"),
    ],
)
def test_a_large_step_is_computed_as_far_as_it_is_quick(slow_machine, monkeypatch, tmp_path, longest, computed, text):
    monkeypatch.setattr(first_step, "_LARGE_STEP", 1.0)
    monkeypatch.setattr(first_step, "LONGEST_STEP_SECONDS", longest)
    whole = dry("xl-debug", tmp_path)
    assert slow_machine == [16, 16, 64, *computed], "rows of 16 tokens, the longest of this model"
    assert text in whole.describe()
    measured = bool(computed)
    assert (whole.loss is not None, whole.peak_bytes is not None) == (measured, measured)
    expected = 1.32 * 2 if computed == [32, 32] else 1.64
    assert whole.step_seconds == pytest.approx(expected)
    assert whole.processor_seconds == pytest.approx(2 * expected)


def test_short_steps_do_not_change_the_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    names = ("xl-debug", "debug")  # one with a memory, one without
    found = [dry(name, tmp_path).loss for name in names]
    monkeypatch.setattr(first_step, "_LARGE_STEP", 1.0)
    assert [dry(name, tmp_path).loss for name in names] == found


def test_a_memory_of_short_steps_is_not_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Four lanes, as many as the last short step has rows."""
    config: Any = PRESETS["xl-debug"]()
    config = replace(config, run_dir=str(tmp_path / "run"), data=replace(config.data, accumulate=1))
    assert config.data.lanes == first_step._SHORT_STEPS[-1]
    found = first_step.first_step(config).loss
    monkeypatch.setattr(first_step, "_LARGE_STEP", 1.0)
    assert first_step.first_step(config).loss == found
