"""metrics.jsonl, whose bytes do not depend on interruptions, and the plain text log."""

from __future__ import annotations

import errno
import json
import math
import os
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from manyheads.errors import DataError
from manyheads.evaluation.reading import show_perplexity
from manyheads.files.commit import saving
from manyheads.files.safe_open import open_regular, open_to_append

if TYPE_CHECKING:
    from manyheads.training.record.report import Reporter, RunStart, StepReport, TrainResult, ValidationReport

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
