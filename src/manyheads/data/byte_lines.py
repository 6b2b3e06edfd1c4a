"""Bytes and lines of them, from a file, a FIFO or standard input, plain or gzip, cut at "\\n" and nowhere else.

`str.splitlines` also cuts at U+2028, U+0085 and others that stand inside real sentences; it would shift one language
against the other. So lines are cut while they are still bytes.
"""

from __future__ import annotations

import gzip
import io
import select
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from manyheads.errors import DataError

__all__ = ["MAX_LINE_BYTES", "ByteLines", "describe", "opened", "read_chunks"]

MAX_LINE_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20
GZIP_MAGIC = b"\x1f\x8b"

_Read = Callable[[int], bytes]
_CanRead = Callable[[float], bool]


def describe(path: str | Path) -> str:
    """How messages call a path: as it is, but for what cannot be shown on one line or is no Unicode."""
    name = str(path)
    return "standard input" if name == "-" else name if name.isprintable() else repr(name)[1:-1]


class ByteLines:
    """Lines without their "\\n"; a last line needs none. Made by `opened`.

    Args:
        read: some more bytes, at least one; none at the end. May wait, but for no more than there is.
        can_read: whether `read` would return within so many seconds.

    Attributes:
        given: lines given so far.
        unended: whether the last line has been read, and had no "\n".
    """

    def __init__(self, read: _Read, can_read: _CanRead) -> None:
        self._read = read
        self._can_read = can_read
        self._whole: deque[bytes] = deque()
        self._begun: list[bytes] = []  # of a line whose end is not here yet
        self._begun_bytes = 0
        self._ended = False
        self.given = 0
        self.unended = False

    def next(self) -> bytes | None:
        """The next line, or None at the end. Of a line above MAX_LINE_BYTES only somewhat more than that is read."""
        while not self._whole and not self._ended:
            self._fill()
        if not self._whole:
            return None
        self.given += 1
        return self._whole.popleft()

    def ready(self, seconds: float) -> bool:
        """Whether another line, or the end, can be had without waiting longer than this."""
        until = time.monotonic() + seconds
        while not self._whole and not self._ended:
            if not self._can_read(max(0.0, until - time.monotonic())):
                return False
            self._fill()
        return True

    def _fill(self) -> None:
        chunk = self._read(CHUNK_BYTES)
        first, *more = chunk.split(b"\n")
        self._begun.append(first)
        self._begun_bytes += len(first)
        self._ended = not chunk
        self.unended = self._ended and self._begun_bytes > 0
        if more or self._begun_bytes > MAX_LINE_BYTES or self.unended:
            self._whole.append(b"".join(self._begun))
            self._whole.extend(more[:-1])
            self._begun = more[-1:]
            self._begun_bytes = sum(map(len, self._begun))


class _Pushed:
    """A stream that cannot be rewound (pipe, FIFO), with the bytes already taken from it put back in front.

    It reads what is there now: a person at the keyboard waits for no full block.
    """

    def __init__(self, head: bytes, rest: io.BufferedReader) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int) -> bytes:
        if self._head:
            part, self._head = self._head[:size], self._head[size:]
            return part
        return self._rest.read1(size)

    def can_read(self, seconds: float) -> bool:
        return bool(self._head) or _has_bytes(self._rest, seconds)


def _has_bytes(file: io.BufferedReader, seconds: float) -> bool:
    """Whether a read would not wait; yes, too, where that cannot be asked: it never waits long for a file on disk."""
    try:
        poll = select.poll()
        poll.register(file.fileno(), select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    except (AttributeError, OSError, ValueError):  # no such call on Windows; no file behind the stream
        return True


@contextmanager
def opened(path: str | Path) -> Iterator[ByteLines]:
    """The lines of a file, of a FIFO, or of standard input for `-`; unpacked if they begin as gzip does.

    Raises: DataError: the file cannot be opened or read.
    """
    lines: ByteLines | None = None

    def place() -> str:
        return f"after line {lines.given}" if lines is not None and lines.given else ""

    with _reading(path, place) as (read, can_read):
        lines = ByteLines(read, can_read)
        yield lines


def read_chunks(path: str | Path) -> Iterator[bytes]:
    """The bytes of a file, a FIFO or standard input, a block at a time; unpacked if they begin as gzip does.

    Raises: DataError: the file cannot be opened or read.
    """
    given = 0
    with _reading(path, lambda: f"after byte {given}" if given else "") as (read, _):
        while chunk := read(CHUNK_BYTES):
            given += len(chunk)
            yield chunk


@contextmanager
def _reading(path: str | Path, place: Callable[[], str]) -> Iterator[tuple[_Read, _CanRead]]:
    """The two functions that `ByteLines` takes. place: how far reading has come, in words; empty at the beginning."""
    name = describe(path)
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise DataError("Standard input is closed; name a file, or give the text through a pipe.")
            yield _unpacked(cast(io.BufferedReader, sys.stdin.buffer))
        else:
            with Path(path).open("rb") as file:
                yield _unpacked(file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        reason = str(error).rstrip(".")
        raise DataError(
            f"{name} begins like a gzip file but is cut off or damaged {place() or 'at its beginning'}: {reason}."
            " Copy or pack it once more."
        ) from None
    except IsADirectoryError:
        raise DataError(f"{name} is a directory; a text file was expected.") from None
    except OSError as error:
        raise DataError(f"Cannot read {name}: {error.strerror or error}.") from None
    except ValueError as error:  # a NUL inside the path
        raise DataError(f"Cannot read {name}: {error}.") from None


def _unpacked(file: io.BufferedReader) -> tuple[_Read, _CanRead]:
    head = file.read1(len(GZIP_MAGIC))
    if head == GZIP_MAGIC[:1]:
        head += file.read1(1)
    stream = _Pushed(head, file)
    if head != GZIP_MAGIC:
        return stream.read, stream.can_read
    # What waits inside the decompressor cannot be asked for, so packed text is read in full blocks.
    unpacked = gzip.GzipFile(fileobj=cast(IO[bytes], stream), mode="rb")
    return unpacked.read1, lambda seconds: True
