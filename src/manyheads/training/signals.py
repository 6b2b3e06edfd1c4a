"""SIGINT and SIGTERM only raise a flag; the loops look at it and end in a complete checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopFlag", "catch_signals"]


class StopFlag:
    """Set by the first signal (or by `stop`). `signal_number` is None until then."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def stop(self, number: int = signal.SIGINT) -> None:
        """Ask the loops to end."""
        self.signal_number = int(number)


@contextmanager
def catch_signals(flag: StopFlag) -> Iterator[StopFlag]:
    """Inside the block the first SIGINT or SIGTERM sets the flag, the second ends the process at once.

    Only the main thread may handle signals; elsewhere the block changes nothing. The exit code of a second signal is
    128 + its number, as a shell would report it. Nothing is lost by that: what is half written has a temporary name.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if flag:
            os._exit(128 + number)
        flag.stop(number)

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
