"""How a training run is shown while a step, a validation or the preparation of data takes long."""

import io
import re
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from clock import Clock
from rich.console import Console

from manyheads.cli.watching import training as progress
from manyheads.cli.watching.training import LineReporter, LiveReporter, NotebookReporter, QuietReporter, watching
from manyheads.training.record.log import PlainReporter
from manyheads.training.record.report import RunStart, Sample, StepReport, TrainResult, ValidationReport


def step(number: int, *, logged: bool = False, elapsed: float = 65.0, eta: float | None = 30.0) -> StepReport:
    return StepReport(
        step=number, max_steps=100, epoch=0, loss=3.25, nll=3.0, learning_rate=1e-3, grad_norm=1.5, tokens=1000,
        tokens_per_second=12345.0, elapsed_seconds=elapsed, eta_seconds=eta, memory_bytes=2**30, progress=number / 100,
        logged=logged,
    )  # fmt: skip


def start(tmp_path: Path) -> RunStart:
    return RunStart(run_dir=tmp_path, device="cpu", precision="fp32", num_parameters=7, data="data", step=0,
                    max_steps=100, max_minutes=2.0)  # fmt: skip


def result(tmp_path: Path, **more: Any) -> TrainResult:
    return TrainResult(run_dir=tmp_path, step=1, epoch=0, tokens=1, elapsed_seconds=1.0, stopped_by="steps",
                       signal_number=None, checkpoint=None, model_dir=None, best_step=None, best_score=None,
                       **more)  # fmt: skip


def after(reporter: LineReporter, clock: Clock, seconds: int, stream: io.StringIO) -> list[tuple[float, str]]:
    """Seconds pass, with a beat after each. Returns: the lines that came, with their times."""
    found = []
    for second in range(1, seconds + 1):
        clock.now += 1
        before = len(stream.getvalue())
        reporter.beat()
        found += [(float(second), line) for line in stream.getvalue()[before:].split("\n") if line]
    return found


def test_lines_come_within_one_long_step(tmp_path: Path) -> None:
    clock, stream = Clock(), io.StringIO()
    reporter = LineReporter(stream, clock)
    reporter.start(start(tmp_path))
    reporter.doing("step 1")
    lines = after(reporter, clock, 60, stream)
    assert lines[0] == (9.0, "step 1: 9s so far")
    assert lines[-1][1] == "step 1: 54s so far"
    times = [0.0, *(time for time, _ in lines), 60.0]
    assert max(later - earlier for earlier, later in pairwise(times)) <= 10
    reporter.step(step(1, elapsed=60.0, eta=60.0))
    reporter.doing("validation at step 1")
    [(_, line)] = after(reporter, clock, 10, stream)  # the last line was six seconds old
    assert line == "validation at step 1: 3s so far | after step 1: loss 3.2500 | 12,345 tokens/s | 1:03 | eta 57s"


def test_lines_come_before_the_first_step() -> None:
    clock, stream = Clock(), io.StringIO()
    reporter = LineReporter(stream, clock)
    assert after(reporter, clock, 10, stream) == [(9.0, "starting: 9s so far")]
    reporter.doing("read train", 20_000, 60_000)
    assert after(reporter, clock, 9, stream) == [(8.0, "read train: 20,000 of 60,000, 8s so far")]


def test_steps_of_some_seconds_are_told_though_none_is_logged() -> None:
    clock, stream = Clock(), io.StringIO()
    reporter = LineReporter(stream, clock)
    for number in range(1, 31):
        after(reporter, clock, 2, stream)
        reporter.step(step(number))
    lines = stream.getvalue().split("\n")[:-1]
    assert [line.split(" ")[1] for line in lines] == [
        "4/100",
        "8/100",
        "12/100",
        "16/100",
        "20/100",
        "24/100",
        "28/100",
    ]
    assert all(line.startswith("step ") and "| loss 3.2500 |" in line for line in lines)


def test_short_steps_are_told_where_they_are_logged_alone() -> None:
    clock, stream = Clock(), io.StringIO()
    reporter = PlainReporter(stream, clock=clock)
    for number in range(1, 41):
        clock.now += 0.1
        reporter.doing(f"step {number}")
        reporter.step(step(number, logged=number % 20 == 0))
    assert [line.split(" ")[1] for line in stream.getvalue().split("\n")[:-1]] == ["20/100", "40/100"]


def test_lines_of_two_threads_stay_whole() -> None:
    class Slow(io.StringIO):
        """Lets other threads in within a line."""

        def write(self, text: str) -> int:
            for letter in text:
                super().write(letter)
                pause.wait(1e-6)
            return len(text)

    pause, clock, stream = threading.Event(), Clock(), Slow()
    reporter = LineReporter(stream, clock)
    reporter.doing("step 1")

    def beat() -> None:
        for _ in range(30):
            clock.now += 20
            reporter.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    for _ in range(30):
        reporter.message("a message from the loop")
    thread.join()
    known = re.compile(r"a message from the loop|step 1: [0-9:]+s? so far")
    assert all(known.fullmatch(line) for line in stream.getvalue().split("\n")[:-1])


@pytest.mark.parametrize("every", [1, 150, 10_000])
def test_a_notebook_gets_few_lines_spread_over_the_run(tmp_path: Path, every: int) -> None:
    clock, stream = Clock(), io.StringIO()
    reporter = NotebookReporter(stream, clock)
    reporter.doing("encode train", 1, 2)
    after(reporter, clock, 3600, stream)
    reporter.start(start(tmp_path))
    report = ValidationReport(step=0, loss=2.0, samples=(Sample(source="I", text="ich", reference="Ich"),))
    for number in range(1, 10_001):
        clock.now += 10
        reporter.beat()
        reporter.step(replace(step(number, logged=True), progress=number / 10_000))
        if number % every == 0:
            report = replace(report, step=number, bleu=12.0, bleu_signature="nrefs:1")
            reporter.validation(report)
    reporter.message("the disk is full", "warning")
    told = stream.getvalue().count("\n")
    reporter.done(result(tmp_path, last_validation=report))
    lines = stream.getvalue().split("\n")[:-1]
    assert len(lines) <= 32
    assert "train.log has all of them" in stream.getvalue()
    assert "warning: the disk is full" in lines
    assert lines[told:][-4:-1] == ["  source      I", "  reference   Ich", "  translation ich"]
    assert f"validation at step {report.step} | nll 2.0000" in stream.getvalue()
    steps = [int(line.split("/")[0].split()[-1]) for line in lines if line.startswith("step ")]
    validations = [int(line.split(" |")[0].split()[-1]) for line in lines if line.startswith("validation ")]
    shown = sorted([*steps, *validations])
    assert max(later - earlier for earlier, later in pairwise([0, *shown, 10_000])) <= 2000


def test_quiet_means_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with watching(quiet=True) as reporter:
        assert "heartbeat" not in {thread.name for thread in threading.enumerate()}
        assert isinstance(reporter, QuietReporter)
        reporter.doing("step 1")
        reporter.step(step(1, logged=True))
        reporter.message("a warning", "warning")
    assert stream.getvalue() == "warning: a warning\n"


def test_a_run_without_a_terminal_is_watched_by_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, beaten = io.StringIO(), threading.Event()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_BEAT_SECONDS", 0.001)
    monkeypatch.setattr(LineReporter, "beat", lambda self: beaten.set())
    with watching() as reporter:
        assert isinstance(reporter, LineReporter)
        assert beaten.wait(60)


def live(clock: Clock) -> tuple[io.StringIO, LiveReporter]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    return screen, LiveReporter(console, clock=clock)


def test_the_live_display_moves_within_a_long_step(tmp_path: Path) -> None:
    clock = Clock()
    screen, live_reporter = live(clock)

    def shown() -> str:
        screen.seek(0)
        screen.truncate()
        reporter.beat()
        return screen.getvalue()

    with live_reporter as reporter:
        assert "starting: 0s so far" in screen.getvalue()
        reporter.doing("opening the data")
        clock.now += 4
        assert "opening the data: 4s so far" in shown()
        reporter.start(start(tmp_path))
        reporter.doing("step 1")
        clock.now += 30
        assert "step 1: 30s so far" in shown()
        reporter.step(step(1, elapsed=34.0, eta=86.0))
        reporter.doing("step 2")
        clock.now += 1
        assert "so far" not in shown()  # the step is not long yet
        clock.now += 19
        text = shown()
        for part in ("step 2: 20s so far", "step 1/100", "loss 3.250", "12,345 tokens/s", "54s of 2:00  ETA 1:06"):
            assert part in text, part
        reporter.doing("validation at step 2")
        clock.now += 100
        assert "validation at step 2: 1:40 so far" in shown()
        assert "ETA 0s" in shown()  # never below nothing
    assert shown() == ""  # a beat after the end writes nothing


def test_the_live_display_is_gone_when_the_run_is_done(tmp_path: Path) -> None:
    screen, live_reporter = live(Clock())
    with live_reporter as reporter:
        reporter.start(start(tmp_path))
        reporter.done(result(tmp_path))
        length = len(screen.getvalue())
        reporter.beat()
        assert len(screen.getvalue()) == length
