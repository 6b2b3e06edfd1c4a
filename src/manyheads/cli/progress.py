"""A run as it is seen in a terminal: two moving lines at the bottom, and above them what stays."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manyheads.training.log import PlainReporter, format_seconds
from manyheads.training.report import Reporter, RunStart, StepReport, TrainResult, ValidationReport

__all__ = ["LiveReporter", "QuietReporter", "watching"]

_REDRAW_SECONDS = 0.2


@contextmanager
def watching(*, quiet: bool = False, verbose: bool = False) -> Iterator[Reporter]:
    """The reporter that fits stderr: moving lines in a terminal, plain lines elsewhere, warnings alone if `quiet`."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield QuietReporter(sys.stderr)
    elif console.is_terminal and not console.is_dumb_terminal:
        with LiveReporter(console, verbose=verbose) as reporter:
            yield reporter
    else:
        yield PlainReporter(sys.stderr)


class QuietReporter(PlainReporter):
    """Warnings alone."""

    def start(self, start: RunStart) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def validation(self, report: ValidationReport) -> None: ...

    def done(self, result: TrainResult) -> None: ...

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        if level == "warning":
            super().message(text, level)


class LiveReporter:
    """Moving lines, redrawn from the training loop itself a few times a second: no thread takes its time.

    Args:
        console: of a terminal.
        verbose: also a line that stays for every logged step.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose
        self._report: StepReport | None = None
        self._max_minutes = 0.0
        self._loss = 0.0
        self._drawn = 0.0
        self._waiting = "opening the data ..."
        self._live = Live(console=console, auto_refresh=False, transient=True, get_renderable=self._render)

    def __enter__(self) -> LiveReporter:
        self._live.__enter__()
        self._live.refresh()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def start(self, start: RunStart) -> None:
        where = f"going on at step {start.step:,}" if start.step else "a new run"
        self._print(Text.assemble((str(start.run_dir), "bold"), f": {where}"))
        self._print(Text(f"  {start.num_parameters:,} parameters, {start.device}, {start.precision}", "dim"))
        for line in start.data.split("\n"):
            self._print(Text(f"  {line}", "dim"))
        self._max_minutes = start.max_minutes
        self._waiting = "the first step ..."
        self._redraw()

    def step(self, report: StepReport) -> None:
        first = self._report is None
        self._loss = report.loss if first or report.logged else 0.9 * self._loss + 0.1 * report.loss
        self._report = report
        if self._verbose and report.logged:
            self._print(Text(f"  {self._figures(report)}  gradient norm {report.grad_norm:.2f}", "dim"))
        self._redraw()

    def validation(self, report: ValidationReport) -> None:
        scores = f"  loss {report.loss:.4f}  perplexity {report.perplexity:.2f}"
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
        self._live.stop()

    def _print(self, text: Text) -> None:
        self._console.print(text, overflow="fold")

    def _redraw(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._drawn >= _REDRAW_SECONDS:
            self._live.refresh()
            self._drawn = time.monotonic()

    def _render(self) -> Group | Text:
        report = self._report
        if report is None:
            return Text(self._waiting, "dim")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(
                total=1.0,
                completed=report.progress,
                width=min(40, max(self._console.width - 45, 10)),
                complete_style="cyan",
            ),
            Text(f"{report.progress:4.0%}", "bold"),
            Text(self._clock(report), no_wrap=True),
        )
        return Group(bar, Text(self._figures(report), no_wrap=True, overflow="ellipsis"))

    def _clock(self, report: StepReport) -> str:
        elapsed = format_seconds(report.elapsed_seconds)
        if self._max_minutes:
            elapsed += f" of {format_seconds(60 * self._max_minutes)}"
        return elapsed if report.eta_seconds is None else f"{elapsed}  ETA {format_seconds(report.eta_seconds)}"

    def _figures(self, report: StepReport) -> str:
        total = f"/{report.max_steps:,}" if report.max_steps else ""
        return (
            f"step {report.step:,}{total}  epoch {report.epoch + 1}  loss {self._loss:.3f}"
            f"  rate {report.learning_rate:.2e}  {report.tokens_per_second:,.0f} tokens/s"
            f"  {report.memory_bytes / 2**20:,.0f} MiB"
        )


def _line(text: str) -> str:
    return text.replace("\n", "\\n")
