"""A thread that shows how long the work has taken, also while the working thread is in one long computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Phase:
    """The current phase of the work: its name, its progress, and the time since it began.

    Args: clock: seconds, of any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = ("", 0, 0, clock(), 0)

    def begin(self, what: str, done: int = 0, total: int = 0) -> None:
        """Set all of it; the time starts again where `what` changes. total: 0 while it is unknown."""
        before, _, _, since, first = self._now
        if what != before:
            since, first = self._clock(), done
        # One assignment, so the displaying thread never sees a part of a change.
        self._now = (what, done, total, since, first)

    def seconds(self) -> float:
        """Since `what` changed."""
        return self._clock() - self._now[3]

    def describe(self) -> str:
        """`translating: 512 of 1,000, 12s so far, 11s left`; empty before the first `begin`."""
        from manyheads.training.record.log import format_seconds  # imported only when needed: --help must be fast

        what, done, total, since, first = self._now
        if not what:
            return ""
        count = f"{done:,} of {total:,}, " if total else f"{done:,}, " if done else ""
        seconds = self._clock() - since
        left = f", {format_seconds(seconds * (total - done) / (done - first))} left" if first < done < total else ""
        return f"{what}: {count}{format_seconds(seconds)} so far{left}"


class Heartbeat:
    """Calls a function again and again, from a thread of its own, inside a `with` block.

    The thread ends with the block. If the function cannot write any more (a closed terminal), the thread ends early.

    Args:
        beat: must be safe to call beside the thread that works, and short.
        seconds: between two calls.
    """

    def __init__(self, beat: Callable[[], None], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._end.wait(self._seconds):
                self._beat()
        except (OSError, ValueError):
            return  # the stream is closed; the working thread will notice it itself
