"""Messages and counts for lines of a file that are refused, cut or replaced."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from manyheads.data.lines import ReadReport, describe
from manyheads.errors import RequestError

__all__ = ["TruncationCounter", "counted_truncations", "naming_lines", "tell_bad_lines"]


class TruncationCounter(logging.Handler):
    """Shows the first few warnings of the decoding room on standard error and counts all of them."""

    shown = 5

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger."""
        self.count += 1
        if self.count <= self.shown:
            _tell(record.getMessage().replace("text ", "line ", 1))


@contextmanager
def naming_lines(**paths: str) -> Iterator[None]:
    """Name the file and the line where the library speaks of a numbered text that it refuses.

    Args: paths: what the library calls such a text (`text`, `source`, `reference`) -> the file it is a line of.

    Raises: RequestError: as it came, in other words.
    """
    try:
        yield
    except RequestError as error:
        kind, _, rest = str(error).partition(" ")
        if kind not in paths or not rest[:1].isdigit():
            raise
        told = f"{describe(paths[kind])}: line {rest}".replace("set too_long to", "use --too-long")
        raise RequestError(told.replace("max_tokens if", "--max-tokens if")) from error


def tell_bad_lines(report: ReadReport) -> None:
    """Say how many lines were not UTF-8, and what became of them; nothing where there are none."""
    for count, what in ((report.bad_utf8_replaced, "bad bytes replaced"), (report.bad_utf8_skipped, "skipped")):
        if count:
            _tell(f"lines that are not UTF-8, {what}: {count}")


@contextmanager
def counted_truncations() -> Iterator[TruncationCounter]:
    """Count the lines that are cut inside the block; the number is printed at its end, unless it is 0."""
    counter = TruncationCounter()
    logger = logging.getLogger("manyheads.decoding.fit")
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(counter)
    try:
        yield counter
    finally:
        logger.removeHandler(counter)
        logger.propagate = propagated
        if counter.count:
            _tell(f"lines cut because they were too long: {counter.count}")


def _tell(text: str) -> None:
    """In one call, so that a line of progress that another thread writes does not come between text and line end."""
    sys.stderr.write(f"manyheads: {text}\n")
    sys.stderr.flush()
