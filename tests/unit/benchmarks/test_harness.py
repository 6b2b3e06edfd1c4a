"""The protocol of the benchmarks: sides in turn, failures told, slow sides left out, ratios of the same round."""

import fcntl
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
Import = Callable[[str], ModuleType]


@pytest.fixture
def harness(benchmark_module: Import) -> ModuleType:
    return benchmark_module("harness")


def side(harness: ModuleType, name: str, build: str, /, **options: Any) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return harness.Side(name, f"trivial_sides:{build}", options, sys.executable, environment)


def sleeper(harness: ModuleType, name: str, milliseconds: float, log: Path, /, **options: Any) -> Any:
    return side(harness, name, "sleeper", name=name, milliseconds=milliseconds, log=str(log), **options)


def test_sides_take_turns(harness: ModuleType, tmp_path: Path) -> None:
    """Each works while the others wait; what libraries print does not come between."""
    log = tmp_path / "log"
    sides = [(sleeper(harness, "a", 5, log), 0.02), (sleeper(harness, "b", 10, log, chatty=True), 0.02)]
    found = harness.take_turns(sides, rounds=3)
    turns = "".join(name for name, _ in itertools.groupby(log.read_text()))
    assert turns == "ab" * 4  # the first of each is its warm-up
    for name in "ab":
        assert len(found[name].rates) == 3
        assert min(found[name].rates) > 0
        assert found[name].peak_bytes > 1 << 20
        assert found[name].extras == {"seven": [7.0, 7.0, 7.0]}
        assert found[name].about["parameters"] == 100
        assert not found[name].failure
    assert max(found["a"].rates) <= 10 / 0.005
    ratio = harness.spread(found["a"].rates, found["b"].rates)
    assert 0 < ratio.lowest <= ratio.median <= ratio.highest


def test_a_side_that_fails_says_why_and_the_others_go_on(harness: ModuleType, tmp_path: Path) -> None:
    sides = [
        (side(harness, "broken", "broken"), 0.0),
        (side(harness, "mortal", "mortal", steps=2), 0.0),
        (sleeper(harness, "a", 1, tmp_path / "log"), 0.0),
    ]
    told: list[str] = []
    found = harness.take_turns(sides, rounds=4, on_progress=told.append)
    assert "no such model, sorry" in found["broken"].failure
    assert "out of memory" in found["mortal"].failure
    assert found["broken"].rates == found["mortal"].rates == []
    assert len(found["a"].rates) == 4
    assert any("sorry" in text for text in told)


def test_a_side_that_does_not_answer_is_killed(harness: ModuleType, tmp_path: Path) -> None:
    child = sleeper(harness, "slow", 60_000, tmp_path / "log")
    with pytest.raises(harness.TooSlowError, match="the warm-up did not end within 1 s"):
        harness.Child(child, most_seconds=1.0)
    child = side(harness, "endless", "endless")
    with pytest.raises(harness.SideError, match="endless was not built within 1 s"):
        harness.Child(child, build_seconds=1.0)


@pytest.mark.parametrize(
    ("warm", "reason"), [(0, "the warm-up did not end"), (1, "the first turn, of 0 s, did not end")]
)
def test_a_side_that_is_too_slow_is_left_out(harness: ModuleType, tmp_path: Path, warm: int, reason: str) -> None:
    """Its process is killed, with what it has started; the reason is no failure; the others go on."""
    lock = tmp_path / "lock"
    sides = [
        (side(harness, "slow", "tardy", warm=warm, lock=str(lock)), 0.0),
        (sleeper(harness, "a", 1, tmp_path / "log"), 0.0),
    ]
    told: list[str] = []
    found = harness.take_turns(sides, rounds=2, on_progress=told.append, most_seconds=3.0)
    assert found["slow"].left_out == f"{reason} within 3 s"
    assert not found["slow"].failure
    assert found["slow"].rates == []
    assert f"slow is left out: {reason} within 3 s" in told
    assert len(found["a"].rates) == 2
    assert is_free(lock)


def is_free(lock: Path) -> bool:
    """Whether nobody holds it any more, as soon as those who were killed have ended."""
    with lock.open() as file:
        for _ in range(400):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return True
    return False


def test_no_answer_is_lost_to_a_slow_reader(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent may find that the side is built and that it is warm in one look."""
    look = harness.select.select

    def late(*arguments: Any) -> Any:
        time.sleep(1.0)
        return look(*arguments)

    monkeypatch.setattr(harness, "select", SimpleNamespace(select=late))
    child = harness.Child(side(harness, "mortal", "mortal", steps=1), most_seconds=2.0)
    child.close()
    assert child.about["units"] == 1.0


def test_the_limit_is_of_the_first_turn_only(harness: ModuleType, tmp_path: Path) -> None:
    """A side that has shown its rate is kept when a later turn takes longer."""
    child = harness.Child(side(harness, "patient", "slower_later", seconds=1.5), most_seconds=1.0)
    try:
        assert child.ask(0.0)["steps"] == 1
        assert child.ask(0.0)["steps"] == 1
    finally:
        child.close()


def test_spread_is_of_the_ratios_within_a_round(harness: ModuleType) -> None:
    """A slow round of both sides changes nothing."""
    ratio = harness.spread([30.0, 3.0, 40.0], [10.0, 1.0, 10.0])
    assert (ratio.median, ratio.lowest, ratio.highest) == (3.0, 3.0, 4.0)
    assert harness.spread([1.0, 2.0], factor=10).median == 15
    with pytest.raises(ValueError, match="2 rounds against 1"):
        harness.spread([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="0 rounds"):
        harness.spread([])


def test_table(harness: ModuleType) -> None:
    lines = harness.markdown_table(("side", "rate"), [["ours", "12"], ["a peer", "3"]])
    assert lines == ["| side   | rate |", "|--------|-----:|", "| ours   |   12 |", "| a peer |    3 |"]
