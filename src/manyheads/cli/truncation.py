"""What is cut because it is too long is said, and counted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TruncationCounter", "counted_truncations"]


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
            print(f"manyheads: {record.getMessage().replace('text ', 'line ', 1)}", file=sys.stderr)


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
            print(f"manyheads: lines cut because they were too long: {counter.count}", file=sys.stderr)
