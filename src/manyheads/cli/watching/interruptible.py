"""A clean end on signals, also for work that waits in a library or for a pipe."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from manyheads.data.lines import Progress

T = TypeVar("T")
GRACE_SECONDS = 3.0


class StoppedBySignalError(Exception):
    """Raised inside the work by its own progress function, where nothing is half done. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


def interruptible(work: Callable[[Progress], T], show: Progress, abandon: Callable[[], None]) -> T:
    """Do work that SIGINT, SIGTERM and SIGHUP can stop even while it waits in a library or for a pipe.

    The work runs in a thread of its own. After a signal its next call of the progress function raises
    StoppedBySignalError, so that it cleans up by itself; if no call comes within a few seconds, `abandon` cleans up
    and the process ends at once with 128 + the signal's number.

    Args:
        work: called with the progress function.
        show: what the progress function shows.
        abandon: removes whatever is half written. Called from the main thread while the work still stands.

    Raises: StoppedBySignalError; whatever the work raises.
    """
    caught: list[int] = []
    result: list[T] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def progress(what: str, count: int, total: int) -> None:
        if caught:
            raise StoppedBySignalError(caught[0])
        show(what, count, total)

    def target() -> None:
        try:
            result.append(work(progress))
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    def handle(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, handle) for number in _signals()}
    try:
        threading.Thread(target=target, daemon=True).start()
        since = None
        while not done.wait(0.05):
            since = since or (time.monotonic() if caught else None)
            if since and (time.monotonic() - since > GRACE_SECONDS or len(caught) > 1):
                abandon()
                os._exit(128 + caught[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failure:
        raise failure[0]
    return result[0]


def _signals() -> tuple[signal.Signals, ...]:
    """Only the main thread may handle signals. SIGHUP stays ignored where it is ignored, as by nohup."""
    if threading.current_thread() is not threading.main_thread():
        return ()
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Windows has none
        return signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    return signal.SIGINT, signal.SIGTERM
