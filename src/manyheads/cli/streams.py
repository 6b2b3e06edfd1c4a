"""Handling of standard input, output and error that are closed, full, or no longer read."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


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
