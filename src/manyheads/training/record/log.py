"""The records of a run: metrics.jsonl, whose bytes do not depend on interruptions, and the plain text log.

Callbacks are objects that a run calls with numbers; the loggers of the core are callbacks with names. A run computes
the same with them and without them: they get records of plain values, and random draws of theirs change no step, which
seeds its own (see `training.run.step`).
"""

from __future__ import annotations

import csv
import errno
import importlib.util
import io
import json
import math
import os
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from manyheads.catalogue import LOGGERS, made_by
from manyheads.config.checks import not_among
from manyheads.errors import ConfigError, DataError, ManyHeadsError, MissingExtraError, SaveError
from manyheads.evaluation.reading import show_perplexity
from manyheads.files.commit import saving, write_text
from manyheads.files.safe_open import open_regular, open_to_append
from manyheads.installation import needing_extra

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from manyheads.training.record.report import (
        CheckpointReport,
        Reporter,
        RunStart,
        StepReport,
        TrainResult,
        ValidationReport,
    )


SILENT_SECONDS = 8.0
"""After this many seconds without a line, a step gets one even if `log_every` does not require it."""
MOST_LINE_BYTES = 1 << 20
"""Of metrics.jsonl: a line has about 200."""
MOST_POINTS = 8192
"""Of a curve in a picture; longer runs are thinned."""


class MetricsLog:
    """Append-only file of one JSON object per line.

    A checkpoint records the length of the file. A resumed run truncates the file to this length, so that every step is
    written once. Values that depend on the clock belong in another file (timing.jsonl), because the bytes would differ
    otherwise. If a line cannot be written, it is written before the next one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._length: int | None = None  # of the complete lines in the file; None: the whole file
        self._waiting = b""

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; NaN and infinity, which JSON does not have, become null.

        Raises: SaveError: the line could not be written yet.
        """
        plain = {key: _plain(value) for key, value in record.items()}
        self._waiting += (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode()
        self._write(sync=False)

    def flush(self) -> None:
        """Write the lines of earlier failures.

        Raises: SaveError: they still cannot be written.
        """
        if self._waiting:
            self._write(sync=False)

    def num_bytes(self) -> int:
        """Return the file's length after syncing it.

        Raises: SaveError: it could not be written or synced.
        """
        return self._write(sync=True)

    def _write(self, *, sync: bool) -> int:
        with saving(self.path, len(self._waiting)), open_to_append(self.path) as file:
            if self._length is None or file.tell() < self._length:
                self._length = file.tell()
            elif file.tell() > self._length:
                file.truncate(self._length)  # remove an incomplete line, for example after the disk was full
            if self._waiting:
                if file.write(self._waiting) < len(self._waiting):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._length += len(self._waiting)
                self._waiting = b""
            if sync:
                os.fsync(file.fileno())
            return self._length

    def cut(self, num_bytes: int) -> bool:
        """Truncate the file to `num_bytes`. Returns: False if the file is shorter, so that lines are lost.

        Raises: SaveError: it could not be truncated.
        """
        with saving(self.path, 0), open_to_append(self.path) as file:
            before = file.tell()
            if before > num_bytes:
                file.truncate(num_bytes)
                os.fsync(file.fileno())
        self._length, self._waiting = min(before, num_bytes), b""
        return before >= num_bytes


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """The records of a metrics.jsonl that may still grow: each `read` goes on where the last one ended.

    Every validation is kept. Of other records every 2^n-th is kept, so that there are at most `MOST_POINTS`; which ones
    depends on their number only, not on when they were read.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._begin = self._count = 0
        self._every = 1
        self._kept: list[tuple[int, dict[str, Any]]] = []  # with their numbers

    def read(self) -> list[dict[str, Any]]:
        """Return the records so far, in their order.

        Raises: DataError: see `each_metrics`.
        """
        for record, end in each_metrics(self._path, self._begin):
            self._begin = end
            self._kept += [(self._count, record)] if self._stays(self._count, record) else []
            self._count += 1
            if self._count >= self._every * MOST_POINTS:
                self._every *= 2
                self._kept = [(number, one) for number, one in self._kept if self._stays(number, one)]
        return [record for _, record in self._kept]

    def _stays(self, number: int, record: Mapping[str, Any]) -> bool:
        return number % self._every == 0 or "valid_nll" in record


def each_metrics(path: Path | str, begin: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each record of a run's metrics.jsonl and the offset of its end; an incomplete last line is left out.

    Args: begin: the offset in bytes of the first line to read.

    Raises: DataError: the file cannot be read, is not a regular file, or a line before the last is not a JSON object.
    """
    try:
        with open_regular(Path(path)) as file:
            place, number = file.seek(begin), 0
            while line := file.readline(MOST_LINE_BYTES):
                place, number = place + len(line), number + 1
                where = f"{path}, line {number}" + f" after byte {begin:,}" * bool(begin)
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if not line.endswith(b"\n") and not file.read(1):
                        return
                    raise DataError(f"{where} is not JSON: {error}.") from error
                if not isinstance(record, dict):
                    raise DataError(f"{where} is not a JSON object but a {type(record).__name__}.")
                yield record, place
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


class LogFile:
    """train.log as a text stream. A line that cannot be written is lost, which never ends a run.

    Each line opens the file, because an earlier run's log may be moved (`RunFolder.set_aside`).

    Args:
        path: the file, to which lines are appended.
        warn: called once at the first lost line.

    Raises: SaveError: the file cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._failed = False
        with saving(path, 0):
            open_to_append(path).close()

    def write(self, text: str) -> None:
        """Append the text immediately."""
        try:
            with open_to_append(self._path) as file:
                file.write(text.encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._warn(f"{self._path} cannot be written ({error.strerror or error}); its lines are lost.")

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""


class Stream(Protocol):
    """The destination of lines: a text file, or `LogFile`."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class PlainReporter:
    """Writes lines to a stream that is not a terminal, or to train.log: logged steps, and a step after eight silent
    seconds.

    Args:
        stream: open text file.
        timestamps: begin each line with date and time.
        clock: returns seconds; any origin.
    """

    def __init__(
        self, stream: Stream, *, timestamps: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._timestamps = timestamps
        self._clock = clock
        self._last_line = clock()

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Do nothing: lines report finished work only."""

    def start(self, start: RunStart) -> None:
        where = f"resuming at step {start.step}" if start.step else "a new run"
        size = f"{start.num_parameters:,} parameters"
        self._line(f"{start.run_dir}: {where}, {size}, {start.device}, {start.precision}")
        for line in start.data.split("\n"):
            self._line(f"  {line}")

    def step(self, report: StepReport) -> None:
        if not report.logged and self._silent_seconds() < SILENT_SECONDS:
            return
        total = f"/{report.max_steps}" if report.max_steps else ""
        eta = "" if report.eta_seconds is None else f" | eta {format_seconds(report.eta_seconds)}"
        self._line(
            f"step {report.step}{total} | epoch {report.epoch + 1} | loss {report.loss:.4f} | nll {report.nll:.4f}"
            f" | lr {report.learning_rate:.3e} | norm {report.grad_norm:.2f} | {report.tokens_per_second:,.0f} tokens/s"
            f" | {format_seconds(report.elapsed_seconds)}{eta} | {report.memory_bytes / 2**20:,.0f} MiB"
        )

    def validation(self, report: ValidationReport) -> None:
        perplexity = show_perplexity(report.perplexity)
        scores = f"validation at step {report.step} | nll {report.loss:.4f} | perplexity {perplexity}"
        scores += "".join(f" | {score}" for score in report.scores())
        self._line(scores + (" | best so far" if report.best else ""))
        for signature in report.signatures():
            self._line(f"  {signature}")
        for sample in report.samples:
            for name, text in sample.labelled():
                self._line(f"  {name:<11} {text}")

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        self._line(f"warning: {text}" if level == "warning" else text)

    def done(self, result: TrainResult) -> None:
        self._line(self._end(result))

    def _end(self, result: TrainResult) -> str:
        best = f"; best: {result.best()}" if result.best() is not None else ""
        reason = {"steps": "steps done", "minutes": "time is up", "patience": "no improvement"}
        reason |= {"callback": "stopped by a callback", "signal": "stopped"}
        return (
            f"ended at step {result.step} after {format_seconds(result.elapsed_seconds)}"
            f" ({reason[result.stopped_by]}){best}"
        )

    def _silent_seconds(self) -> float:
        return self._clock() - self._last_line

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ") if self._timestamps else ""
        self._stream.write(stamp + _one_line(text) + "\n")
        self._stream.flush()


def _one_line(text: str) -> str:
    """Return a text without line ends and control characters, which `grep` would take for a binary file.

    A model that has learned little generates them.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else ascii(char)[1:-1] for char in text
    )


class Reporters:
    """Several reporters as one."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = tuple(reporters)

    def start(self, start: RunStart) -> None:
        for reporter in self._reporters:
            reporter.start(start)

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        for reporter in self._reporters:
            reporter.doing(what, done, total)

    def step(self, report: StepReport) -> None:
        for reporter in self._reporters:
            reporter.step(report)

    def validation(self, report: ValidationReport) -> None:
        for reporter in self._reporters:
            reporter.validation(report)

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        for reporter in self._reporters:
            reporter.message(text, level)

    def done(self, result: TrainResult) -> None:
        for reporter in self._reporters:
            reporter.done(result)


def format_seconds(seconds: float) -> str:
    """Return `45s`, `3:20`, `2:03:20`."""
    whole = int(seconds + 0.5)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest}s"


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
