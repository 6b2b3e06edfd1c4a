"""Rates at the steps where the formulas are easy to check by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.training.optim.schedule import learning_rate, noam
from manyheads.training.settings import ScheduleSettings


def rate(kind: str, step: int, progress: float = 0.0, *, warmup: int = 100, min_ratio: float = 0.0) -> float:
    settings = ScheduleSettings(kind=kind, warmup_steps=warmup, min_ratio=min_ratio)  # type: ignore[arg-type]
    return learning_rate(settings, peak=2.0, d_model=512, step=step, progress=progress)


def test_noam_is_the_papers_formula() -> None:
    for step in (1, 10, 3999, 4000, 4001, 100_000):
        expected = 0.5 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert noam(step, factor=0.5, d_model=512, warmup_steps=4000) == expected
    assert noam(0, factor=1.0, d_model=512, warmup_steps=4000) == noam(1, factor=1.0, d_model=512, warmup_steps=4000)
    assert rate("noam", 7) == noam(7, factor=2.0, d_model=512, warmup_steps=100)


@pytest.mark.parametrize("kind", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_warm_up_is_a_line_to_the_peak(kind: str) -> None:
    assert rate(kind, 1, 0.001) == 0.02
    assert rate(kind, 50, 0.05) == 1.0
    assert rate(kind, 100, 0.1) == 2.0
    assert rate(kind, 0) == rate(kind, 1)


def test_after_the_warm_up() -> None:
    assert rate("inverse_sqrt", 400) == 1.0
    assert rate("constant", 10**6, 1.0) == 2.0
    assert rate("cosine", 550, 0.55) == pytest.approx(1.0)
    assert rate("linear", 550, 0.55) == pytest.approx(1.0)
    assert rate("cosine", 1000, 1.0) == pytest.approx(0.0, abs=1e-12)
    assert rate("linear", 1000, 1.0) == pytest.approx(0.0, abs=1e-12)
    assert rate("cosine", 1000, 1.0, min_ratio=0.1) == pytest.approx(0.2)
    assert rate("linear", 550, 0.55, min_ratio=0.1) == pytest.approx(1.1)


@given(
    kind=st.sampled_from(["noam", "inverse_sqrt", "cosine", "linear", "constant"]),
    step=st.integers(0, 10**7),
    progress=st.floats(0, 1),
    warmup=st.integers(1, 10**5),
    min_ratio=st.floats(0, 1),
)
def test_a_rate_is_never_negative_nor_above_the_peak(kind, step, progress, warmup, min_ratio):
    value = rate(kind, step, progress, warmup=warmup, min_ratio=min_ratio)
    assert 0 <= value <= 2.0 * (1 + 1e-12)


@given(kind=st.sampled_from(["cosine", "linear"]), step=st.integers(101, 999))
def test_rates_fall_after_the_warm_up(kind: str, step: int) -> None:
    assert rate(kind, step + 1, (step + 1) / 1000) < rate(kind, step, step / 1000)
