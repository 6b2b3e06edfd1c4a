"""Work in phases: shown, and ended by a signal where nothing is half done."""

from __future__ import annotations

import os
import signal
import time

import pytest

from manyheads.cli.phases import Progress, StoppedBySignalError, interruptible, showing_phases


def test_a_signal_stops_the_work_at_its_next_step() -> None:
    steps: list[int] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def work(progress: Progress) -> None:
        for step in range(1000):
            progress("count", step, 1000)
            steps.append(step)
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01 if step >= 3 else 0)

    with pytest.raises(StoppedBySignalError) as caught:
        interruptible(work, lambda *_: None, lambda: pytest.fail("it stopped by itself"))
    assert caught.value.number == signal.SIGTERM
    assert 3 in steps
    assert len(steps) < 1000
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_results_and_errors_come_through() -> None:
    assert interruptible(lambda progress: 5, lambda *_: None, lambda: None) == 5

    def fail(progress: Progress) -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        interruptible(fail, lambda *_: None, lambda: None)


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with showing_phases() as show:
        for done in range(0, 50_000, 10_000):
            show("read train", done, 0)
        show("read train", 50_000, 50_000)
        show("encode train", 50_000, 50_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.split("\n") == [
        "read train: 0",
        "read train: 50,000 of 50,000",
        "encode train: 50,000 of 50,000",
        "",
    ]
