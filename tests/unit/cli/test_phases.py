"""Work in phases: shown, and ended by a signal where nothing is half done."""

import io
import os
import signal
import sys
import threading
import time

import pytest
from clock import Clock
from rich.console import Console

from manyheads.cli.watching.phases import (
    DELAY_SECONDS,
    PhaseBars,
    PhaseLines,
    StoppedBySignalError,
    interruptible,
    showing_if_long,
    showing_phases,
)
from manyheads.data.lines import Progress, phase_progress


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


def test_a_notebook_gets_fewer_lines_the_longer_the_work_takes(capsys, monkeypatch):
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    clock = Clock()
    lines = PhaseLines(0.0, clock)
    for second in range(36_000):
        clock.now += 1
        lines("translating", second, 36_000)
        lines.beat()
    told = capsys.readouterr().err.split("\n")
    assert 20 < len(told) <= 40


def test_a_long_command_shows_lines_after_two_seconds_and_every_ten(capsys: pytest.CaptureFixture[str]) -> None:
    assert DELAY_SECONDS == 2.0
    clock = Clock()
    lines = PhaseLines(DELAY_SECONDS, clock)
    told = phase_progress(lines, "translating", 1000)
    found = []
    for half_second in range(1, 61):
        clock.now += 0.5
        if half_second == 30:
            told(512)
        lines.beat()
        found += [(half_second / 2, line) for line in capsys.readouterr().err.split("\n") if line]
    assert found == [
        (2.0, "translating: 0 of 1,000, 2s so far"),
        (11.5, "translating: 0 of 1,000, 12s so far"),
        (21.0, "translating: 512 of 1,000, 21s so far, 20s left"),
    ]


def test_a_quick_command_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = PhaseLines(DELAY_SECONDS, clock)
    for done in range(4):
        clock.now += 0.49
        lines("loading the model" if done < 2 else "scoring", done, 4)
        lines.beat()
    lines.close()
    assert capsys.readouterr().err == ""


def test_a_phase_without_calls_is_shown_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """As the learning of a tokenizer, which calls nobody."""
    clock = Clock()
    lines = PhaseLines(0.0, clock)
    lines("train the tokenizer", 0, 1)
    assert capsys.readouterr().err == "train the tokenizer: 0 of 1\n"
    for _ in range(20):
        clock.now += 0.5
        lines.beat()
    assert capsys.readouterr().err == "train the tokenizer: 0 of 1, 10s so far\n"


def test_nothing_is_shown_while_input_is_awaited(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = PhaseLines(DELAY_SECONDS, clock)
    lines.rest()
    for number in range(3):
        clock.now += 100
        lines.beat()
        lines("translating lines", number, 0)  # which is done at once
        lines.beat()
        lines.rest()
    assert capsys.readouterr().err == ""
    lines("translating lines", 3, 0)
    clock.now += 3
    lines.beat()
    assert capsys.readouterr().err == "translating lines: 3, 3s so far\n"


def bars(clock: Clock, delay: float) -> tuple[io.StringIO, PhaseBars]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    return screen, PhaseBars(console, delay, clock)


def test_bars_appear_after_the_delay_and_vanish() -> None:
    clock = Clock()
    screen, shown = bars(clock, DELAY_SECONDS)
    shown("scor[i]ng", 1, 4)
    clock.now += 1.9
    shown.beat()
    assert screen.getvalue() == ""
    clock.now += 0.2
    shown.beat()
    shown("scor[i]ng", 2, 4)
    shown.close()
    text = screen.getvalue()
    assert "scor[i]ng" in text
    assert "2/4" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert text.endswith("\x1b[2K")  # and the line is empty
    shown.beat()
    shown.close()


def test_bars_give_way_to_results() -> None:
    clock = Clock()
    screen, shown = bars(clock, DELAY_SECONDS)
    clock.now += 3
    shown("scoring", 1, 4)
    shown.beat()
    with shown.hidden(False):
        assert not screen.getvalue().endswith("\x1b[2K")
    with shown.hidden(True):
        assert screen.getvalue().endswith("\x1b[2K")
        length = len(screen.getvalue())
    shown.beat()
    assert "1/4" in screen.getvalue()[length:]
    shown.rest()
    length = len(screen.getvalue())
    clock.now += 100
    shown.beat()
    assert len(screen.getvalue()) == length  # nothing is done
    shown("scoring", 2, 4)
    shown.beat()
    assert len(screen.getvalue()) == length  # not long yet
    shown.close()


def test_standard_output_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal rich would send what is printed there to standard error."""
    output = sys.stdout
    _, shown = bars(Clock(), 0.0)
    shown.beat()
    assert sys.stdout is output
    shown.close()


def test_one_rank_of_several_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("manyheads.cli.watching.phases.DELAY_SECONDS", 0.0)
    for rank in ("1", "0"):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "1")
        with showing_if_long() as show:
            show("scoring", 4, 4)
            show.rest()
            with show.hidden(True):
                assert ("heartbeat" in {thread.name for thread in threading.enumerate()}) == (rank == "0")
        assert capsys.readouterr().err == ("scoring: 4 of 4\n" if rank == "0" else "")


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with showing_phases() as show:
        assert isinstance(show, PhaseBars)
        show("read train", 3, 4)
    assert "3/4" in screen.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    with showing_phases() as show:
        assert isinstance(show, PhaseLines)
