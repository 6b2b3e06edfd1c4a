"""A clean end on SIGTERM, and on SIGHUP, which a closed terminal sends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StoppedBySystem(BaseException):
    """Raised in the main thread by a signal, so that `finally` and `with` delete what is half written.

    It is no Exception, so that nothing that handles an error goes on after it. number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise StoppedBySystem for the first SIGTERM or SIGHUP within the block; the second ends the process at once.

    A signal that is ignored, as by nohup, or that somebody else handles, stays so. Only the main thread can handle
    signals; in other threads the block has no effect.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        for one in handled:
            signal.signal(one, signal.SIG_DFL)
        raise StoppedBySystem(number)

    handled: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has one
        handled = [one for one in known if signal.getsignal(one) is signal.SIG_DFL]
    for one in handled:
        signal.signal(one, handle)
    try:
        yield
    finally:
        for one in handled:
            if signal.getsignal(one) is handle:
                signal.signal(one, signal.SIG_DFL)
