"""A run that will make too few steps says so once, early, and not because its first step was slow."""

from dataclasses import replace

import pytest
import torch

from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.run.clock import FewSteps
from manyheads.training.settings import RunConfig, TrainingSettings


def config(minutes: float = 5.0, max_steps: int = 0, base: RunConfig | None = None) -> RunConfig:
    base = TrainConfig(precision="bf16") if base is None else base
    return replace(base, training=TrainingSettings(max_minutes=minutes, max_steps=max_steps))


def warnings(config: RunConfig, seconds: list[float], num_tokens: int = 1000) -> list[tuple[int, str]]:
    """Take steps of these times. Returns: the steps after which something was said, and what."""
    few, elapsed, said = FewSteps(config, "cpu"), 0.0, []
    for step, one in enumerate(seconds, 1):
        elapsed += one
        text = few.after(step, elapsed, one, num_tokens)
        if text is not None:
            said.append((step, text))
    return said


def test_one_thread_is_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert " with 1 thread on cpu " in warnings(config(), [61.0])[0][1]


def test_it_is_said_once_with_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    [(step, text)] = warnings(config(), [61.0, 50.0, 50.0, 50.0])
    assert step == 1
    assert "about 4 steps in 5 minutes" in text
    assert "In bf16 with" in text
    assert "2 threads on cpu a step takes 61 s, 16 target tokens/s" in text
    for remedy in ("--precision", "--num-threads", "--data.max_tokens", "a smaller model", "--minutes"):
        assert remedy in text


@pytest.mark.parametrize(
    ("seconds", "after"),
    [
        ([0.1] * 12, None),
        ([15.0, *[0.1] * 12], None),  # a slow first step is no sign
        ([15.0, 15.0, *[0.1] * 12], 2),  # two are
        ([15.0, 4.5, *[4.5] * 12], 2),
        ([15.0, 2.5, *[2.5] * 12], 5),  # 120 steps: what is not much too slow is looked at longer
        ([1.0, 6.0, 0.5, 0.5, 0.5, 0.5], None),  # one slow step among them is no sign either
        ([*[0.1] * 10, *[2.9] * 20], None),  # later steps are not looked at
        ([30.0], 1),
        ([15.0], None),
    ],
)
def test_when_it_is_said(seconds: list[float], after: int | None) -> None:
    assert [step for step, _ in warnings(config(), seconds)] == ([] if after is None else [after])


def test_only_of_runs_that_the_clock_ends() -> None:
    slow = [60.0] * 12
    assert warnings(config(minutes=0.0, max_steps=20), slow) == []
    assert warnings(config(minutes=30.0, max_steps=20), slow) == []
    assert [step for step, _ in warnings(config(minutes=10.0, max_steps=20), slow)] == [2]
    assert "about 10 steps in 10 minutes" in warnings(config(minutes=10.0, max_steps=20), slow)[0][1]


def test_a_run_that_goes_on_counts_its_earlier_steps() -> None:
    few = FewSteps(config(), "cpu")
    assert few.after(141, 240.0, 6.0, 1000) is None  # 60 s are left, and 9 steps are missing
    assert few.after(142, 246.0, 6.0, 1000) is None
    few = FewSteps(config(), "cpu")
    text = few.after(3, 240.0, 6.0, 1000)
    assert text is not None
    assert "about 13 steps" in text


def test_a_language_model_hears_of_its_own_settings() -> None:
    [(_, text)] = warnings(config(1.0, base=TextConfig()), [61.0])
    assert "about 1 step in 1 minute;" in text
    assert "a lower --data.lanes or --data.segment_len or a smaller model" in text
    assert "max_tokens" not in text
