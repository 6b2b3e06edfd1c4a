"""The process of a command: memory and threads for torch, its three streams, its end by a signal, and printing.

Memory: every training step frees and allocates the same large tensors. By default glibc returns each such block to the
system at once and gets it again as pages of zeros, each with a page fault. So glibc is told to keep freed blocks, and
torch to use pages of 2 MiB. Measured over 120 steps of the demo's model in bf16, one thread, torch 2.13 and glibc 2.36:
31,600 page faults a step as it comes, 3,700 with blocks kept, 2,000 with large pages too.

Blocks of 256 MiB and more are returned all the same: kept ones of many sizes leave gaps. Of the preset `million` only
tensors of a whole sequence are that large; on one sequence of 32,768 tokens, with limits in proportion, the peak of a
step is a quarter lower than with a limit of 1 GiB. A step of the demo has no such block.

Threads: OpenMP's threads spin between two operations, for some milliseconds by default. This is fastest if every thread
has a core. If another program is busy, a spinning thread takes the core that the thread it waits for needs, and a step
of 0.2 s took 12 s (two cores, two threads). Spinning a thirtieth as long costs nothing on a free machine, a hundredth
as long costs a fifth of the speed there, and is the better on a busy one. See docs/decisions/004.

Streams: each may be closed, full, or no longer read. Signals: SIGTERM, and SIGHUP, which a closed terminal sends, end a
command in order.

Printing: a folder's name, a value of its config.json or a sample can contain escape sequences, which change colours,
move the cursor or retitle the window, and characters that reverse the text beside them. Here they become visible. Data
for other programs (`--json`, translations in a pipe, files) is not printed by these functions.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**31 - 1
_MAPPED_BYTES = 2**28
_LARGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")  # read by torch when it is first used, as the next by OpenMP
_SPINS = "GOMP_SPINCOUNT"
_FREE_SPINS, _BUSY_SPINS = "10000", "3000"


def set_up_machine() -> bool:
    """Apply these settings. Call it before torch is imported. Variables that the user has set are not changed.

    Returns: whether glibc keeps blocks now; False elsewhere than on Linux with glibc.
    """
    if sys.platform != "linux":
        return False
    os.environ.setdefault(*_LARGE_PAGES)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(_SPINS, _BUSY_SPINS if _is_busy() else _FREE_SPINS)
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version  # musl has a mallopt too, which does nothing
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all([mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES), mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)])


def _is_busy() -> bool:
    """Return whether other processes are computing in each of three checks within milliseconds."""
    for _ in range(3):
        try:
            running = int(Path("/proc/loadavg").read_text("ascii").split()[3].split("/")[0])
        except (OSError, ValueError, IndexError):
            return True
        if running <= 1:  # this process itself
            return False
        time.sleep(0.001)
    return True


def set_up_streams() -> None:
    """Put the null device where a stream is closed, and let no command fail because its messages cannot be written.

    Without the first the next file that is opened gets the number of the closed stream, and what a library prints goes
    into that file; and `print` writes to standard output what was meant for a standard error that is None.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    elif sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        encoding, raw = sys.stderr.encoding, _Messages(sys.stderr.fileno(), "wb", closefd=False)
        sys.stderr = io.TextIOWrapper(raw, encoding, "backslashreplace", write_through=True)


class _Messages(io.FileIO):
    """Standard error.

    Text that the system does not accept, because the disk is full or the reader of a pipe has closed it, is dropped,
    and the work continues.
    """

    def write(self, content: Any) -> int:
        """Write all bytes, or drop what is left. Returns: their number."""
        left = memoryview(content)
        try:
            while left and (written := super().write(left)):
                left = left[written:]
        except OSError:
            pass
        return len(content)


def abandon_output() -> None:
    """Discard the unwritten rest of standard output. Otherwise Python would try again at exit, and report an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


def echo(*parts: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print as `print` does, with the characters of `printable`. file: None: standard output, as it is now."""
    text = " ".join(map(str, parts))
    print(printable(text), end=end, file=sys.stdout if file is None else file, flush=flush)


def say_or_json(record: object, text: str, *, as_json: bool) -> None:
    """Print a record as JSON for programs, or its text for people."""
    if as_json:
        from manyheads.files.verify import json_text  # imported here, because help does not need it

        print(json_text(record, indent=2))
    else:
        echo(text)


def printable(text: str) -> str:
    """Return a text in which characters that are not printable, other than line ends, are written as Python does."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
