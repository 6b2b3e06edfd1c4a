"""Display of a training run: in a terminal, live lines at the bottom with permanent lines above them; elsewhere, plain
lines.

A step, a validation or a save may take minutes, so a heartbeat shows every few seconds what the run is doing.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.console import Group as Lines
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manyheads.cli.command_line.parsing import program
from manyheads.cli.process import printable
from manyheads.cli.watching.phases import ColouredLines, Heartbeat, Phase, is_in_notebook, is_kernel, wants_colours
from manyheads.config.files import to_yaml
from manyheads.distributed.launch import DEFAULT_TIMEOUT, start
from manyheads.errors import RankLostError
from manyheads.evaluation.reading import show_perplexity
from manyheads.training.record.log import PlainReporter, Stream, format_seconds

if TYPE_CHECKING:
    from manyheads.distributed.group import Group
    from manyheads.distributed.process import Process
    from manyheads.training.record.report import Reporter, RunStart, StepReport, TrainResult, ValidationReport
    from manyheads.training.settings import RunConfig

_REDRAW_SECONDS = 0.2
_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 9.0
"""Silent seconds before a beat writes a line.

With one beat per second there is a line at least every ten seconds. The end of a step is reported one second earlier.
"""
_CELL_SECONDS = 0.5
"""Between two texts of the line in a notebook's cell."""
_LONG_SECONDS = 2.0
"""The live display shows a phase only after this many seconds."""
_STARTING = "starting"
_MOST_REPORTS, _MOST_BEATS = 14, 6
"""Lines in a notebook: of steps and validations, and of beats."""


@contextmanager
def watching(*, quiet: bool = False, verbose: bool = False) -> Iterator[Reporter]:
    """The reporter that fits stderr: moving lines in a terminal, plain lines elsewhere, few of them in a notebook.

    If `quiet`, warnings alone; in a kernel also one line that changes, and at the end the learning curve.
    """
    console = Console(stderr=True, highlight=False)
    if quiet and is_kernel():
        cell = CellReporter(sys.stderr)
        with Heartbeat(cell.beat, _BEAT_SECONDS):
            yield cell
    elif quiet:
        yield QuietReporter(sys.stderr)
    elif sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal:
        with LiveReporter(console, verbose=verbose) as reporter, Heartbeat(reporter.beat, _BEAT_SECONDS):
            yield reporter
    else:
        stream: Stream = ColouredLines(sys.stderr) if wants_colours() else sys.stderr
        lines = NotebookReporter(stream) if is_in_notebook() else LineReporter(stream)
        with Heartbeat(lines.beat, _BEAT_SECONDS):
            yield lines


def train_and_watch(
    config: RunConfig,
    resume: str,
    process: Process,
    callbacks: object = (),
    *,
    timeout: float = DEFAULT_TIMEOUT,
    quiet: bool = False,
    verbose: bool = False,
    sized: Callable[[RunConfig, str, Group], RunConfig] | None = None,
) -> TrainResult:
    """Train in this process, which may be one of several ranks: only the main rank shows its progress.

    Args:
        config: the settings of the run.
        resume: as of `training.run.loop.train`.
        process: this one, with its rank.
        callbacks: as of `training.run.loop.train`.
        timeout: seconds after which a silent rank is lost.
        quiet: show warnings alone.
        verbose: show also the settings, and a line for every logged step.
        sized: of several ranks: the settings, `resume` and the ranks -> the settings for the precision of all.
    """
    with watching(quiet=quiet, verbose=verbose) if process.is_main else nullcontext() as reporter:
        from manyheads.checkpoint.format import list_checkpoints
        from manyheads.decoding.model_runner import choose_device
        from manyheads.training.run.loop import train

        # A launcher that starts again runs the same command, which must not throw away the steps done so far.
        own = list_checkpoints(Path(config.run_dir) / "checkpoints") if process.restarts else []
        resume = "auto" if process.restarts and (own or resume == "none") else resume
        group = start(process, choose_device(config.device).type, timeout)
        try:
            if process.world > 1 and sized is not None:
                config = sized(config, resume, group)
            if verbose and process.is_main:
                print(to_yaml(config), file=sys.stderr)
            result = train(config, resume=resume, reporter=reporter, group=group, callbacks=callbacks)
            group.close()
        except RankLostError:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # report the reason before the launcher ends the others
            raise
    return result


def summary(result: TrainResult) -> str:
    """The summary at the end of a run, and the next command."""
    lines = [("run", str(result.run_dir))]
    best = result.best()
    if best is not None:
        lines.append(("best", best))
    for name, before, after in result.compared:
        lines += [("before", f"{before}  ({name})"), ("after", f"{after}  ({name})")]
    if result.plots:
        lines.append(("curve", "  ".join(map(str, result.plots))))
    if result.signal_number is not None:
        name = signal.Signals(result.signal_number).name
        lines.append(("stopped", f"by {name} at step {result.step:,}; the same command continues from there"))
    if result.model_dir is not None:
        lines.append(("next", f"{program()} {result.next_command.format(run=result.run_dir)}"))
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


class QuietReporter(PlainReporter):
    """Warnings alone."""

    def start(self, start: RunStart) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def validation(self, report: ValidationReport) -> None: ...

    def done(self, result: TrainResult) -> None: ...

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        if level == "warning":
            super().message(text, level)


class LineReporter(PlainReporter):
    """Plain lines, of which at least one comes every ten seconds if `beat` is called every second.

    Args:
        stream: open text file.
        clock: seconds, of any origin.
    """

    def __init__(self, stream: Stream, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock=clock)
        self._lock = threading.RLock()
        self._phase = Phase(clock)
        self._phase.begin(_STARTING)
        self._report: tuple[StepReport, float] | None = None

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Shown by the next beat that comes after nine silent seconds."""
        self._phase.begin(what, done, total)

    def step(self, report: StepReport) -> None:
        self._report = (report, self._clock())
        super().step(report)

    def beat(self) -> None:
        """Called every second from another thread."""
        with self._lock:
            if self._silent_seconds() >= _SILENT_SECONDS:
                self._line(self._phase.describe() + self._figures())

    def _figures(self) -> str:
        """Of the last step, with the time that has passed since."""
        if self._report is None:
            return ""
        report, reported = self._report
        since = self._clock() - reported
        figures = f" | after step {report.step}: loss {report.loss:.4f} | {report.tokens_per_second:,.0f} tokens/s"
        figures += f" | {format_seconds(report.elapsed_seconds + since)}"
        if report.eta_seconds is None:
            return figures
        return f"{figures} | eta {format_seconds(max(report.eta_seconds - since, 0.0))}"

    def _line(self, text: str) -> None:
        with self._lock:
            super()._line(printable(text))


class NotebookReporter(LineReporter):
    """As `LineReporter`, but about 30 lines for a run of any length, because a notebook keeps the output of a cell.

    Lines of steps and validations are spread over the run, and a few say that the work goes on. One sample is shown, of
    the last validation. Messages and warnings are all shown, and train.log has every line.
    """

    def __init__(self, stream: Stream, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock)
        self._began = clock()
        self._progress = 0.0
        self._num_lines = self._num_reports = self._num_beats = 0
        self._validated = -1

    def start(self, start: RunStart) -> None:
        super().start(start)
        self._line(f"  a notebook gets few lines; {start.run_dir / 'train.log'} has all of them")

    def step(self, report: StepReport) -> None:
        self._progress, self._report = report.progress, (report, self._clock())
        if self._num_reports < self._due_reports():
            before = self._num_lines
            super().step(report)
            self._num_reports += self._num_lines - before

    def validation(self, report: ValidationReport) -> None:
        if self._num_reports < self._due_reports() + 2:
            self._num_reports += 1
            self._validated = report.step
            short = replace(report, bleu_signature=None, chrf_signature=None, brackets_signature=None, samples=())
            super().validation(short)

    def beat(self) -> None:
        waited = self._clock() - self._began
        with self._lock:
            if self._num_beats < _MOST_BEATS * waited / (waited + _MOST_BEATS * _SILENT_SECONDS):
                before = self._num_lines
                super().beat()
                self._num_beats += self._num_lines - before

    def done(self, result: TrainResult) -> None:
        last = result.last_validation
        if last is not None and last.step != self._validated:
            self._num_reports = 0  # the last one is always shown
            self.validation(last)
        for sample in last.samples[:1] if last is not None else ():
            for name, text in sample.labelled():
                self._line(f"  {name:<11} {text}")
        super().done(result)

    def _due_reports(self) -> float:
        return 1 + (_MOST_REPORTS - 3) * self._progress

    def _line(self, text: str) -> None:
        with self._lock:
            self._num_lines += 1
            super()._line(text)


class CellReporter(LineReporter):
    """In the output of a notebook's cell: one line that changes, warnings, and at the end the learning curve.

    Args:
        stream: gets the warnings.
        clock: seconds, of any origin.
    """

    def __init__(self, stream: Stream, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock)
        from IPython import display

        self._ipython = display
        self._validated = ""
        self._drawn = clock()
        self._cell = self._ipython.display({"text/plain": _STARTING}, raw=True, display_id=True)

    def start(self, start: RunStart) -> None: ...

    def step(self, report: StepReport) -> None:
        self._report = (report, self._clock())
        if self._clock() - self._drawn >= _CELL_SECONDS:
            self.beat()

    def validation(self, report: ValidationReport) -> None:
        scores = [f"loss {report.loss:.4f}", *report.scores(), *(["best so far"] if report.best else [])]
        self._validated = f" | validation at step {report.step}: {', '.join(scores)}"

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        if level == "warning":
            super().message(text, level)

    def beat(self) -> None:
        """Called every second from another thread."""
        is_long = self._report is None or self._phase.seconds() >= _LONG_SECONDS
        self._show((self._phase.describe() if is_long else "training") + self._figures() + self._validated)

    def done(self, result: TrainResult) -> None:
        self._show(f"{self._end(result)} | {result.run_dir}")
        for path in result.plots:
            if path.suffix == ".png":
                self._ipython.display(self._ipython.Image(filename=str(path)))

    def _show(self, text: str) -> None:
        with self._lock:
            self._drawn = self._clock()
            self._cell.update({"text/plain": printable(text)}, raw=True)


class LiveReporter:
    """Moving lines, redrawn a few times a second while steps are short, else by `beat`, from another thread.

    Args:
        console: of a terminal.
        verbose: also a line that stays for every logged step.
        clock: seconds, of any origin.
    """

    def __init__(self, console: Console, *, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._verbose = verbose
        self._clock = clock
        self._lock = threading.RLock()
        self._phase = Phase(clock)
        self._phase.begin(_STARTING)
        self._report: StepReport | None = None
        self._reported = 0.0
        self._max_minutes = 0.0
        self._loss = 0.0
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True, get_renderable=self._render)

    def __enter__(self) -> LiveReporter:
        self._live.__enter__()
        self._live.refresh()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._live.__exit__(None, None, None)

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Shown where it takes long."""
        self._phase.begin(what, done, total)

    def beat(self) -> None:
        """Called every second from another thread."""
        with self._lock:
            self._live.refresh()

    def start(self, start: RunStart) -> None:
        where = f"going on at step {start.step:,}" if start.step else "a new run"
        self._print(Text.assemble((str(start.run_dir), "bold"), f": {where}"))
        self._print(Text(f"  {start.num_parameters:,} parameters, {start.device}, {start.precision}", "dim"))
        for line in start.data.split("\n"):
            self._print(Text(f"  {line}", "dim"))
        self._max_minutes = start.max_minutes
        self._redraw(now=True)

    def step(self, report: StepReport) -> None:
        first = self._report is None
        self._loss = report.loss if first or report.logged else 0.9 * self._loss + 0.1 * report.loss
        self._report, self._reported = report, self._clock()
        if self._verbose and report.logged:
            self._print(Text(f"  {self._figures(report)}  gradient norm {report.grad_norm:.2f}", "dim"))
        self._redraw()

    def validation(self, report: ValidationReport) -> None:
        scores = f"  loss {report.loss:.4f}  perplexity {show_perplexity(report.perplexity)}"
        scores += "".join(f"  {score}" for score in report.scores())
        best = ("  best so far", "green") if report.best else ("", "")
        self._print(Text.assemble("\n", (f"validation, step {report.step:,}", "bold cyan"), scores, best))
        if self._verbose:
            for signature in report.signatures():
                self._print(Text(f"  {signature}", "dim"))
        for sample in report.samples:
            if sample.source:
                self._print(Text(f"  {_line(sample.source)}", "dim"))
            if sample.reference is not None:
                self._print(Text.assemble("  = ", (_line(sample.reference), "dim")))
            self._print(Text.assemble(("  > ", "green"), _line(sample.text)))
        self._redraw(now=True)

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        self._print(Text(f"warning: {text}", "yellow") if level == "warning" else Text(text))

    def done(self, result: TrainResult) -> None:
        with self._lock:
            self._live.stop()

    def _print(self, text: Text) -> None:
        shown = printable(text.plain)
        with self._lock:
            if shown != text.plain:
                text = Text(shown)
            self._console.print(text, overflow="fold")

    def _redraw(self, *, now: bool = False) -> None:
        if now or self._clock() - self._drawn >= _REDRAW_SECONDS:
            with self._lock:
                self._live.refresh()
            self._drawn = self._clock()

    def _render(self) -> Lines | Text:
        report = self._report
        if report is None:
            return Text(self._phase.describe(), "dim")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(
                total=1.0,
                completed=report.progress,
                width=min(40, max(self._console.width - 45, 10)),
                complete_style="cyan",
            ),
            Text(f"{report.progress:4.0%}", "bold"),
            Text(self._times(report), no_wrap=True),
        )
        lines = [Text(self._figures(report), no_wrap=True, overflow="ellipsis")]
        if self._phase.seconds() >= _LONG_SECONDS:
            lines.append(Text(self._phase.describe(), "dim", no_wrap=True, overflow="ellipsis"))
        return Lines(bar, *lines)

    def _times(self, report: StepReport) -> str:
        since = self._clock() - self._reported
        elapsed = format_seconds(report.elapsed_seconds + since)
        if self._max_minutes:
            elapsed += f" of {format_seconds(60 * self._max_minutes)}"
        if report.eta_seconds is None:
            return elapsed
        return f"{elapsed}  ETA {format_seconds(max(report.eta_seconds - since, 0.0))}"

    def _figures(self, report: StepReport) -> str:
        total = f"/{report.max_steps:,}" if report.max_steps else ""
        return (
            f"step {report.step:,}{total}  epoch {report.epoch + 1}  loss {self._loss:.3f}"
            f"  rate {report.learning_rate:.2e}  {report.tokens_per_second:,.0f} tokens/s"
            f"  {report.memory_bytes / 2**20:,.0f} MiB"
        )


def _line(text: str) -> str:
    return text.replace("\n", "\\n")
