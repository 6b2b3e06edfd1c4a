"""What shows that work goes on while the thread that works is inside one long computation."""

import threading

import pytest
from clock import Clock

from manyheads.cli.watching.phases import Heartbeat, Phase


def test_a_phase_says_how_far_it_is_and_since_when() -> None:
    clock = Clock()
    phase = Phase(clock)
    assert phase.describe() == ""
    phase.begin("read")
    clock.now += 3
    assert phase.describe() == "read: 3s so far"
    phase.begin("read", 1500)
    clock.now += 70
    assert phase.describe() == "read: 1,500, 1:13 so far"  # the same phase goes on
    phase.begin("write", 5, 2000)
    assert phase.seconds() == 0
    clock.now += 1
    assert phase.describe() == "write: 5 of 2,000, 1s so far"


def test_it_beats_beside_the_work_and_ends_with_it() -> None:
    beats = threading.Semaphore(0)
    with Heartbeat(beats.release, 0.001) as heartbeat:
        for _ in range(3):
            assert beats.acquire(timeout=60)
        thread = heartbeat._thread
        assert thread.is_alive()
        assert thread.daemon  # it keeps no process alive
    assert not thread.is_alive()


def test_it_ends_quietly_where_nothing_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    def beat() -> None:
        raise BrokenPipeError

    with Heartbeat(beat, 0.001) as heartbeat:
        heartbeat._thread.join(60)
        assert not heartbeat._thread.is_alive()
    assert capsys.readouterr().err == ""


def test_it_ends_with_work_that_fails() -> None:
    with pytest.raises(ZeroDivisionError), Heartbeat(lambda: None, 60) as heartbeat:
        raise ZeroDivisionError
    assert not heartbeat._thread.is_alive()
