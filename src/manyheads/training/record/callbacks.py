"""Callbacks: objects that a run calls with numbers, and the loggers of the core, which are callbacks with names.

A run computes the same with them and without them: they get records of plain values, and random draws of theirs change
no step, which seeds its own (see `training.run.step`).
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyheads.catalogue import LOGGERS, made_by
from manyheads.config.checks import not_among
from manyheads.errors import ConfigError, ManyHeadsError, MissingExtraError, SaveError
from manyheads.files.commit import saving, write_text
from manyheads.files.safe_open import open_to_append
from manyheads.installation import needing_extra
from manyheads.training.record.log import each_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from manyheads.training.record.report import CheckpointReport, RunStart, StepReport, TrainResult, ValidationReport

SLOW_SECONDS = 1.0
"""A callback that takes longer in one call is named."""


class Callback:
    """What a run calls, in its own thread; of several ranks the main one alone does. Each method may be left out.

    Any object with some of these methods is a callback; this class need not be its base. If a method raises, train.log
    gets the traceback, and the callback is not called any more; the run goes on. A `ManyHeadsError` of `on_start` ends
    the run before its first step.
    """

    def on_start(self, start: RunStart) -> None:
        """Before the first step of a run or of its continuation."""

    def on_step(self, report: StepReport) -> Literal["stop"] | None:
        """After every step that changed the model. Returns: `stop` ends the run as its last step would."""

    def on_validation(self, report: ValidationReport) -> None:
        """After every validation."""

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """After every checkpoint, when it is complete."""

    def on_end(self, result: TrainResult) -> None:
        """At the end of the run, also if a signal or a callback stopped it; not after an error."""


class Logger(Callback):
    """A callback that also gets the lines of metrics.jsonl, and is closed."""

    def on_log(self, record: Mapping[str, Any]) -> None:
        """After every line of metrics.jsonl. record: its values by their names, with `step`."""

    def close(self) -> None:
        """At the very end, also after an error."""


_METHODS = ("on_start", "on_step", "on_validation", "on_checkpoint", "on_end", "on_log")


def callbacks_of(chosen: object) -> list[tuple[str, Any]]:
    """Return callbacks with their names: one or several given ones, and the loggers that are given by name.

    Raises: ConfigError: there is no such logger, or an object has no method of a callback. MissingExtraError: a
        logger's package is not installed.
    """
    found: list[tuple[str, Any]] = []
    for one in [chosen] if isinstance(chosen, str) or not isinstance(chosen, Iterable) else chosen:
        name = one if isinstance(one, str) else type(one).__qualname__
        if name is one and name in [before for before, _ in found]:
            continue
        if name is one and name not in LOGGERS:
            raise ConfigError(not_among("there is no logger", name, LOGGERS))
        callback = made_by(LOGGERS, name) if name is one else one
        if isinstance(callback, type) or not any(callable(getattr(callback, method, None)) for method in _METHODS):
            raise ConfigError(
                f"{callback!r} is no callback: an object is needed that has one of the methods {', '.join(_METHODS)}."
            )
        found.append((name, callback))
    return found


class Callbacks:
    """The callbacks of a run, called in their order.

    Args:
        callbacks: see `callbacks_of`.
        warn: called with a sentence about a callback that failed, or is slow.
        log: called with each line of a traceback.

    Attributes: wants_stop: one of them has returned `stop`.

    Raises: ConfigError, MissingExtraError: see `callbacks_of`.
    """

    def __init__(
        self,
        callbacks: object = (),
        warn: Callable[[str], None] = lambda text: None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        found = callbacks_of(callbacks)
        before = [[name for name, _ in found[:place]].count(name) for place, (name, _) in enumerate(found)]
        self._all = [
            (f"{name} {number + 1}" if number else name, callback)
            for number, (name, callback) in zip(before, found, strict=True)
        ]
        self._off: set[str] = set()
        self._slow: set[str] = set()
        self.warn, self.log = warn, log
        self.wants_stop = False

    def call(self, event: str, report: Any) -> None:
        """Call a method of all that have it. Raises: ManyHeadsError: `on_start` refuses to begin."""
        for name, callback in self._all:
            method = getattr(callback, event, None)
            if method is None or name in self._off:
                continue
            began = time.monotonic()
            try:
                answer = method(report)
                if event == "on_step" and answer is not None:
                    if not isinstance(answer, str) or answer != "stop":
                        raise TypeError(f"on_step returned {answer!r}; it returns 'stop' or None")
                    self.wants_stop = True
            except Exception as error:
                if event == "on_start" and isinstance(error, ManyHeadsError):
                    raise
                self._turn_off(name, event, error)
            seconds = time.monotonic() - began
            if seconds > SLOW_SECONDS and event not in ("on_start", "on_end") and name not in self._slow:
                self._slow.add(name)
                self.warn(f"The callback {name} took {seconds:.1f} s in {event}; training waits for it.")

    def close(self) -> None:
        """Close all that can be closed."""
        for name, callback in self._all:
            try:
                getattr(callback, "close", lambda: None)()
            except Exception as error:
                if name not in self._off:
                    self._turn_off(name, "close", error)

    def _turn_off(self, name: str, event: str, error: Exception) -> None:
        self._off.add(name)
        if isinstance(error, ManyHeadsError):
            self.warn(str(error))
            return
        self.warn(
            f"The callback {name} failed in {event} ({type(error).__name__}: {error}) and is off from now on; the"
            " traceback is in train.log."
        )
        for line in "".join(traceback.format_exception(error)).rstrip("\n").split("\n"):
            self.log(line)


class CsvLogger(Logger):
    """metrics.csv: the lines of metrics.jsonl as a table, which a resumed run continues."""

    def on_start(self, start: RunStart) -> None:
        self._lines, self._path = start.run_dir / "metrics.jsonl", start.run_dir / "metrics.csv"
        self._write_all()

    def on_log(self, record: Mapping[str, Any]) -> None:
        if record.keys() - set(self._columns):  # a first validation
            self._write_all()
            return
        row = _table([record], self._columns).encode()
        with saving(self._path, len(row)), open_to_append(self._path) as file:
            file.write(row)

    def _write_all(self) -> None:
        records = [record for record, _ in each_metrics(self._lines)] if self._lines.exists() else []
        self._columns = list(dict.fromkeys(name for record in records for name in record))
        write_text(self._path, _table([dict(zip(self._columns, self._columns, strict=True)), *records], self._columns))


def _table(records: Iterable[Mapping[str, Any]], columns: list[str]) -> str:
    text = io.StringIO()
    for record in records:
        values = (record.get(name) for name in columns)
        finite = (None if isinstance(value, float) and not math.isfinite(value) else value for value in values)
        csv.writer(text, lineterminator="\n").writerow(finite)
    return text.getvalue() if columns else ""


class TensorBoardLogger(Logger):
    """TensorBoard files of the numbers in metrics.jsonl. Raises: MissingExtraError: the package is not installed."""

    def __init__(self) -> None:
        with needing_extra("TensorBoard files need the package tensorboard", "tensorboard"):
            if importlib.util.find_spec("tensorboard") is None:
                raise ImportError("tensorboard")
        self._writer: SummaryWriter | None = None

    def on_start(self, start: RunStart) -> None:
        self._folder, self._first_step = start.run_dir / "tensorboard", start.step

    def on_log(self, record: Mapping[str, Any]) -> None:
        try:
            if self._writer is None:
                self._writer = _open_writer(self._folder, self._first_step)
            for key, value in record.items():
                if isinstance(value, int | float) and key not in ("step", "of_the_first"):
                    self._writer.add_scalar(key, value, record["step"])
        except OSError as error:
            raise SaveError(f"No more TensorBoard files: {error.strerror or error} ({self._folder}).") from error

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()


def _open_writer(folder: Path, first_step: int) -> SummaryWriter:
    """Return a writer that hides later steps in older files, because a resumed run writes them again."""
    from torch.utils.tensorboard import SummaryWriter

    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        """Leave out the traceback that the writer's thread prints besides raising the error in ours."""
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard.")):
            before(failure)

    threading.excepthook = hook
    # Also at the beginning: the run may have been killed before its first checkpoint.
    return SummaryWriter(str(folder), purge_step=first_step + 1)


def with_tensorboard(chosen: object) -> list[object]:
    """Add the files of TensorBoard to callbacks, if the package is installed."""
    callbacks = [chosen] if isinstance(chosen, str) or not isinstance(chosen, Iterable) else [*chosen]
    if not any(isinstance(one, TensorBoardLogger) or one == "tensorboard" for one in callbacks):
        with suppress(MissingExtraError):
            callbacks.append(TensorBoardLogger())
    return callbacks
