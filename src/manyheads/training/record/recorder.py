"""Records of steps and validations: metrics, timing, samples, curves, reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.catalogue import HOOKS, load
from manyheads.config.files import to_json
from manyheads.errors import SaveError
from manyheads.files.commit import write_text
from manyheads.training.record.log import MetricsLog
from manyheads.training.record.report import StepReport, ValidationReport
from manyheads.training.run.clock import FewSteps, RunClock
from manyheads.training.run.device import peak_memory_bytes

if TYPE_CHECKING:
    from manyheads.training.run.components import RunComponents, Surroundings
    from manyheads.training.run.resume import RunFolder
    from manyheads.training.run.step import Fault, StepResult

_SCORES = tuple(item.name for item in fields(ValidationReport) if item.default is None)
"""Fields that a line of metrics contains if the task has them."""


class Recorder:
    """Writes the records of a run. All ranks count; only the main rank writes.

    Args:
        components: its counters contain the sums since the last line of metrics.
        folder: of the run.
        metrics: the file whose bytes must not depend on interruptions.
        surroundings: its reporter and callbacks receive the reports.
        clock: for the values that depend on the clock, which go to timing.jsonl.
    """

    def __init__(
        self,
        components: RunComponents,
        folder: RunFolder,
        metrics: MetricsLog,
        surroundings: Surroundings,
        clock: RunClock,
    ) -> None:
        self._components = components
        self._folder = folder
        self._metrics = metrics
        self._timing = MetricsLog(folder.timing)
        self._reporter, self._callbacks = surroundings.reporter, surroundings.callbacks
        self._clock = clock
        self._painter = load(HOOKS["learning curve"])(folder.metrics, folder.plots, self._warn)
        self._writes = components.group.is_main
        self._began = time.monotonic()
        self._seconds_since, self._tokens_since = 0.0, 0  # of the steps since the last line
        self._few_steps = FewSteps(components.config, str(components.device))
        self._failing: set[Path] = set()
        self._held: dict[Path, Callable[[], None]] = {}

    def _warn(self, text: str) -> None:
        self._reporter.message(text, "warning")

    def begin(self, step: int) -> None:
        """Call before an optimiser step."""
        self._began = time.monotonic()
        self._reporter.doing(f"step {step}")

    def step(self, result: StepResult, rate: float) -> None:
        """Call after an optimiser step that updated the model."""
        counters = self._components.counters
        counters.tokens += result.num_tokens
        counters.window_loss += result.loss_sum
        counters.window_nll += result.nll_sum
        counters.window_tokens += result.num_tokens
        counters.window_norm += result.grad_norm
        counters.window_steps += 1
        self._tokens_since += result.num_tokens
        logged = counters.step % self._components.config.training.log_every == 0
        seconds = time.monotonic() - self._began
        self._seconds_since += seconds
        tokens, steps = (counters.window_tokens, counters.window_steps) if logged else (result.num_tokens, 1)
        report = StepReport(
            step=counters.step,
            max_steps=self._components.config.training.max_steps,
            epoch=counters.epoch,
            loss=(counters.window_loss if logged else result.loss_sum) / tokens,
            nll=(counters.window_nll if logged else result.nll_sum) / tokens,
            learning_rate=rate,
            grad_norm=(counters.window_norm if logged else result.grad_norm) / steps,
            tokens=counters.tokens,
            tokens_per_second=self._tokens_since / max(self._seconds_since, 1e-9),
            elapsed_seconds=counters.elapsed_seconds,
            eta_seconds=self._clock.eta_seconds(counters.step),
            memory_bytes=peak_memory_bytes(self._components.device),
            progress=self._clock.progress(counters.step),
            logged=logged,
        )
        self._reporter.step(report)
        self._callbacks.call("on_step", report)
        warning = self._few_steps.after(counters.step, counters.elapsed_seconds, seconds, result.num_tokens)
        if warning is not None:
            self._warn(warning)
        if logged:
            self.flush(rate)
            self._time(report)

    def flush(self, rate: float) -> None:
        """Write a line with the means since the last line, if there was a step since."""
        counters = self._components.counters
        tokens, steps = counters.window_tokens, counters.window_steps
        if not steps:
            return
        record: dict[str, object] = {
            "step": counters.step,
            "epoch": counters.epoch,
            "tokens": counters.tokens,
            "train_loss": counters.window_loss / tokens,
            "train_nll": counters.window_nll / tokens,
            "learning_rate": rate,
            "grad_norm": counters.window_norm / steps,
        }
        counters.window_loss = counters.window_nll = counters.window_norm = 0.0
        counters.window_tokens = counters.window_steps = 0
        self._write(record)

    def skipped(self, fault: Fault) -> None:
        """Call after a skipped update."""
        self._write({"step": fault.step, "skipped": fault.what})
        self._warn(f"Update skipped. {fault}")

    def dump(self, fault: Fault) -> str:
        """Write all sample ids and names of a failed step to a separate file. Returns: a clause with the path."""
        path = self._folder.path / f"nonfinite-step-{fault.step}.json"
        if not self._writes:
            return f"all sample ids are in {path}"
        try:
            write_text(path, to_json(fault))
        except SaveError as error:  # must not replace the fault itself
            return f"its sample ids could not be kept ({str(error).removesuffix('.')})"
        return f"all sample ids are in {path}"

    def validation(self, report: ValidationReport) -> None:
        """Call after a validation: write a line of metrics and a file of samples, and draw the curve again."""
        record: dict[str, object] = {"step": report.step, "valid_nll": report.loss, "perplexity": report.perplexity}
        scores = {name: getattr(report, name) for name in _SCORES}
        record |= {name: value for name, value in scores.items() if value is not None}
        self._write({**record, "best": report.best})
        if report.samples:
            path = self._folder.samples / f"step-{report.step}.txt"
            self._keep(path, lambda: write_samples(path, report), again=True)
        self.draw()
        self._reporter.validation(report)
        self._callbacks.call("on_validation", report)

    def draw(self) -> tuple[Path, ...]:
        """Draw the current learning curve and return the paths of the plots."""
        paths: tuple[Path, ...] = ()
        if self._components.config.training.plots and self._writes:
            paths = self._painter.draw()
        return paths

    def close(self) -> None:
        """Close the files, after a last attempt to write lines that failed before."""
        for write in (self.catch_up, self._metrics.flush, self._timing.flush) if self._writes else ():
            with suppress(SaveError):
                write()

    def _write(self, record: dict[str, object]) -> None:
        self._keep(self._metrics.path, lambda: self._metrics.append(record))
        self._callbacks.call("on_log", record)

    def _keep(self, path: Path, write: Callable[[], None], *, again: bool = False) -> None:
        """Write something; on_save_error decides what a failure does. A repeated failure is reported once.

        Args:
            path: the path in messages.
            write: raises SaveError.
            again: retry later after a failure (a metrics log does this itself).
        """
        if not self._writes:
            return
        try:
            write()
        except SaveError as error:
            if self._components.config.training.on_save_error == "stop":
                raise
            if path not in self._failing:
                self._warn(f"{error} Training goes on.")
            self._failing.add(path)
            if again:
                self._held[path] = write
        else:
            self._failing.discard(path)
            self._held.pop(path, None)

    def catch_up(self) -> None:
        """Retry failed writes; call this before a checkpoint, which records their state."""
        for path, write in list(self._held.items()):
            self._keep(path, write, again=True)

    def _time(self, report: StepReport) -> None:
        record = {
            "step": report.step,
            "elapsed_seconds": round(report.elapsed_seconds, 3),
            "tokens_per_second": round(report.tokens_per_second, 1),
            "memory_bytes": report.memory_bytes,
        }
        self._keep(self._timing.path, lambda: self._timing.append(record))
        self._seconds_since, self._tokens_since = 0.0, 0


def write_samples(path: Path, report: ValidationReport) -> None:
    """Write the parts of each sample of a validation, with blank lines between samples.

    Raises: SaveError: the file cannot be written.
    """
    blocks = ["".join(f"{name + ':':<12} {text}\n" for name, text in sample.labelled()) for sample in report.samples]
    write_text(path, "\n".join(blocks))
