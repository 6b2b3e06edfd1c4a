"""Handling of SIGINT, SIGTERM and SIGHUP: they set a flag, and the loops end with a complete checkpoint.

With several ranks a signal to one is enough: the group passes it on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from manyheads.distributed.group import Group
from manyheads.errors import ManyHeadsError

SAME_SIGNAL_SECONDS = 3.0
_ASK_SECONDS = 0.2


class StopFlag:
    """Set by the first signal (or by `stop`). `signal_number` is None until then."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def stop(self, number: int = signal.SIGINT) -> None:
        """Request the end of the loops."""
        self.signal_number = int(number)


class SharedStopFlag(StopFlag):
    """One flag for all ranks: setting it on one rank sets it on the others within a fifth of a second.

    This also ends long work that all ranks do equally, such as validation; they agree on it at the next exchange.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self._asked = 0.0
        self._told = False

    def __bool__(self) -> bool:
        if self.signal_number is not None:
            if not self._told:
                self._told = True
                self._group.ask_to_stop(self.signal_number)
            return True
        if time.monotonic() - self._asked < _ASK_SECONDS:
            return False
        self._asked = time.monotonic()
        number = self._group.asked_to_stop()
        if number is None:
            return False
        self.stop(number)
        self._told = True
        return True


@contextmanager
def catch_signals(flag: StopFlag, *, grace: float = 0.0, last_words: Callable[[], str] = str) -> Iterator[StopFlag]:
    """Inside the block the first SIGINT, SIGTERM or SIGHUP sets the flag, the second ends the process at once.

    SIGHUP, which a closed terminal sends, stays ignored where it is ignored, as by nohup.

    Args:
        grace: seconds in which a second signal counts as the first, because a launcher forwards a signal that the
            terminal or the scheduler may already have sent to each process.
        last_words: what to print at the second signal.

    Only the main thread can handle signals; in other threads the block has no effect. The exit code of a second signal
    is 128 + its number, as shells report it. Nothing is lost, because incomplete files have temporary names.
    """

    first: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first >= grace:
            with suppress(OSError, ManyHeadsError):
                os.write(2, last_words().encode("utf-8", "replace"))
            os._exit(128 + number)
        if first is None:
            first = time.monotonic()
            flag.stop(number)

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Windows has none
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
