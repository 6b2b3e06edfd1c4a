"""Turns steps and validations into files and reports: metrics, timing, samples, curves, TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manyheads.checkpoint.commit import write_text
from manyheads.config.files import to_json
from manyheads.errors import SaveError
from manyheads.training.assembly import Assembly
from manyheads.training.device import peak_memory_bytes
from manyheads.training.few_steps import FewSteps
from manyheads.training.log import MetricsLog
from manyheads.training.nonfinite import Fault
from manyheads.training.pace import Pace
from manyheads.training.pictures import Board, CurvePainter
from manyheads.training.report import Reporter, StepReport, ValidationReport
from manyheads.training.run_folder import RunFolder
from manyheads.training.step import StepResult
from manyheads.training.validation import write_samples

__all__ = ["Recorder"]


class Recorder:
    """Writes what can be seen of a run; of several ranks, the main one does. All count.

    Args:
        assembly: its counters hold the sums since the last line of metrics.
        folder: of the run.
        metrics: the file whose bytes must not depend on interruptions.
        reporter: told what is written.
        pace: for the figures that depend on the clock; they go to timing.jsonl.
    """

    def __init__(
        self, assembly: Assembly, folder: RunFolder, metrics: MetricsLog, reporter: Reporter, pace: Pace
    ) -> None:
        self._assembly = assembly
        self._folder = folder
        self._metrics = metrics
        self._timing = MetricsLog(folder.timing)
        self._reporter = reporter
        self._pace = pace
        self._painter = CurvePainter(folder.metrics, folder.plots, self._warn)
        self._writes = assembly.group.is_main
        counters, training = assembly.counters, assembly.config.training
        boards = training.tensorboard and self._writes
        self._board = Board(folder.tensorboard, counters.step, self._warn) if boards else None
        self._since, self._tokens_since = time.monotonic(), 0
        self._began = self._since
        self._few_steps = FewSteps(assembly.config, str(assembly.device))
        self._failing: set[Path] = set()
        self._held: dict[Path, Callable[[], None]] = {}

    def _warn(self, text: str) -> None:
        self._reporter.message(text, "warning")

    def begin(self, step: int) -> None:
        """Before an optimiser step."""
        self._began = time.monotonic()
        self._reporter.doing(f"step {step}")

    def step(self, result: StepResult, rate: float) -> None:
        """After an optimiser step that updated the model."""
        counters = self._assembly.counters
        counters.tokens += result.num_tokens
        counters.window_loss += result.loss_sum
        counters.window_nll += result.nll_sum
        counters.window_tokens += result.num_tokens
        counters.window_norm += result.grad_norm
        counters.window_steps += 1
        self._tokens_since += result.num_tokens
        logged = counters.step % self._assembly.config.training.log_every == 0
        now = time.monotonic()
        tokens, steps = (counters.window_tokens, counters.window_steps) if logged else (result.num_tokens, 1)
        report = StepReport(
            step=counters.step,
            max_steps=self._assembly.config.training.max_steps,
            epoch=counters.epoch,
            loss=(counters.window_loss if logged else result.loss_sum) / tokens,
            nll=(counters.window_nll if logged else result.nll_sum) / tokens,
            learning_rate=rate,
            grad_norm=(counters.window_norm if logged else result.grad_norm) / steps,
            tokens=counters.tokens,
            tokens_per_second=self._tokens_since / max(now - self._since, 1e-9),
            elapsed_seconds=counters.elapsed_seconds,
            eta_seconds=self._pace.eta_seconds(counters.step),
            memory_bytes=peak_memory_bytes(self._assembly.device),
            progress=self._pace.progress(counters.step),
            logged=logged,
        )
        self._reporter.step(report)
        warning = self._few_steps.after(counters.step, counters.elapsed_seconds, now - self._began, result.num_tokens)
        if warning is not None:
            self._warn(warning)
        if logged:
            self.flush(rate)
            self._time(report)

    def flush(self, rate: float) -> None:
        """A line of means since the last one, if there was a step since."""
        counters = self._assembly.counters
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
        """An update that was left out."""
        self._write({"step": fault.step, "skipped": fault.what})
        self._warn(f"Update skipped. {fault}")

    def dump(self, fault: Fault) -> str:
        """Write all sample ids and names of a bad step to a file of its own. Returns: a clause that says where."""
        path = self._folder.path / f"nonfinite-step-{fault.step}.json"
        if not self._writes:
            return f"all sample ids are in {path}"
        try:
            write_text(path, to_json(fault))
        except SaveError as error:  # which must not hide the fault itself
            return f"its sample ids could not be kept ({str(error).removesuffix('.')})"
        return f"all sample ids are in {path}"

    def validation(self, report: ValidationReport) -> None:
        """After a validation: a line of metrics, a file of samples, the curve drawn again."""
        record: dict[str, object] = {"step": report.step, "valid_nll": report.loss, "perplexity": report.perplexity}
        if report.bleu is not None:
            record |= {
                "bleu": report.bleu,
                "chrf": report.chrf,
                "bleu_signature": report.bleu_signature,
                "chrf_signature": report.chrf_signature,
            }
        if report.f1 is not None:
            record |= {
                "f1": report.f1,
                "exact_match": report.exact_match,
                "ill_formed": report.ill_formed,
                "brackets_signature": report.brackets_signature,
            }
        if report.bits_per_byte is not None:
            record["bits_per_byte"] = report.bits_per_byte
        if report.accuracy is not None:
            record["accuracy"] = report.accuracy
        self._write({**record, "best": report.best})
        if report.samples:
            path = self._folder.samples / f"step-{report.step}.txt"
            self._keep(path, lambda: write_samples(path, report), again=True)
        self.draw()
        self._reporter.validation(report)

    def draw(self) -> tuple[Path, ...]:
        """The learning curve as it is now; the pictures' paths."""
        return self._painter.draw() if self._assembly.config.training.plots and self._writes else ()

    def close(self) -> None:
        """Let go of open files; lines that a full disk held up get a last chance."""
        for write in (self.catch_up, self._metrics.flush, self._timing.flush) if self._writes else ():
            with suppress(SaveError):
                write()
        if self._board is not None:
            self._board.close()

    def _write(self, record: dict[str, object]) -> None:
        self._keep(self._metrics.path, lambda: self._metrics.append(record))
        if self._board is not None:
            self._board.add(record)

    def _keep(self, path: Path, write: Callable[[], None], *, again: bool = False) -> None:
        """Write; on_save_error decides what a failure means. One that lasts is told once.

        Args:
            path: what the failure is called by.
            write: raises SaveError.
            again: try again later what was refused (a log of metrics does so by itself).
        """
        if not self._writes:
            return
        try:
            write()
        except SaveError as error:
            if self._assembly.config.training.on_save_error == "stop":
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
        """Try again to write what was refused; to be called where a checkpoint is due, which vouches for it."""
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
        self._since, self._tokens_since = time.monotonic(), 0
