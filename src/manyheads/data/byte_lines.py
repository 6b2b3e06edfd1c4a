"""Reading of bytes and lines from a file, a FIFO or standard input, plain or gzip; lines end at "\\n" only.

`str.splitlines` also splits at U+2028, U+0085 and other characters that occur inside sentences, which would shift one
language against the other. Therefore lines are split before they are decoded.
"""

from __future__ import annotations

import gzip
import io
import os
import select
import stat
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from manyheads.errors import ConfigError, DataError
from manyheads.files.guarded import open_stream

MAX_INPUT_BYTES = 8 * 2**30
"""Maximum number of bytes of an input of unknown size: a packed file, or a stream that is read to its end. 10 MB of
gzip can unpack to 10 GB."""

MAX_LINE_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20
GZIP_MAGIC = b"\x1f\x8b"

_most_bytes = MAX_INPUT_BYTES

_Read = Callable[[int], bytes]
_CanRead = Callable[[float], bool]


@contextmanager
def limited_input(most_bytes: int) -> Iterator[None]:
    """Within the block, refuse inputs above this size in place of MAX_INPUT_BYTES, in all threads of the process.

    Raises: ConfigError: the limit is not above 0.
    """
    if most_bytes < 1:
        raise ConfigError(f"--max-input-bytes is {most_bytes}; it must be at least 1.")
    global _most_bytes
    before, _most_bytes = _most_bytes, most_bytes
    try:
        yield
    finally:
        _most_bytes = before


def describe(path: str | Path) -> str:
    """Return a path as shown in messages: unchanged, unless it cannot be shown on one line or is not Unicode."""
    name = str(path)
    return "standard input" if name == "-" else name if name.isprintable() else repr(name)[1:-1]


class ByteLines:
    """Lines without their "\\n", which a last line does not need. Created by `opened`.

    Args:
        read: returns available bytes, at most the given number; waits until there is at least one; empty at the end.
        can_read: whether `read` would return within the given number of seconds.

    Attributes:
        given: number of lines returned so far.
        unended: whether the last line was read and had no "\\n".
    """

    def __init__(self, read: _Read, can_read: _CanRead) -> None:
        self._read = read
        self._can_read = can_read
        self._whole: deque[bytes] = deque()
        self._begun: list[bytes] = []  # of a line whose end was not read yet
        self._begun_bytes = 0
        self._ended = False
        self.given = 0
        self.unended = False

    def next(self) -> bytes | None:
        """Return the next line, or None at the end. A line above MAX_LINE_BYTES is cut off soon after that many."""
        while not self._whole and not self._ended:
            self._fill()
        if not self._whole:
            return None
        self.given += 1
        return self._whole.popleft()

    def ready(self, seconds: float) -> bool:
        """Return whether another line, or the end, can be read within this time."""
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
    """A stream that cannot be rewound (pipe, FIFO), with the bytes already read from it put back in front.

    It returns the bytes that are available, so interactive input does not wait for a full block.
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
    """Return whether a read would not wait. True where the system cannot tell, because a disk file never waits long."""
    try:
        poll = select.poll()
        poll.register(file.fileno(), select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    except (AttributeError, OSError, ValueError):  # no such call on Windows; no file behind the stream
        return True


@contextmanager
def opened(path: str | Path) -> Iterator[ByteLines]:
    """Open a file, a FIFO, or standard input (`-`) and yield its lines; data that begins like gzip is unpacked.

    Raises: DataError: the file cannot be opened or read, or unpacks to more bytes than `limited_input` allows.
    """
    lines: ByteLines | None = None

    def place() -> str:
        return f"after line {lines.given}" if lines is not None and lines.given else ""

    with _reading(path, place) as (read, can_read):
        lines = ByteLines(read, can_read)
        yield lines


def read_chunks(path: str | Path, *, unpack: bool = True, expected: str = "a text file") -> Iterator[bytes]:
    """Yield the bytes of a file, a FIFO or standard input in blocks.

    Args:
        path: file, FIFO or `-`.
        unpack: unpack data that begins like gzip.
        expected: the kind of file, for the message about a directory.

    Raises: DataError: the file cannot be opened or read; or it is packed or a stream, and has more bytes than
        `limited_input` allows.
    """
    given = 0

    def place() -> str:
        return f"after byte {given}" if given else ""

    with _reading(path, place, unpack, expected, is_kept=True) as (read, _):
        while chunk := read(CHUNK_BYTES):
            given += len(chunk)
            yield chunk


@contextmanager
def _reading(
    path: str | Path,
    place: Callable[[], str],
    unpack: bool = True,
    expected: str = "a text file",
    *,
    is_kept: bool = False,
) -> Iterator[tuple[_Read, _CanRead]]:
    """Open a file and yield the two functions that `ByteLines` takes.

    Args:
        path: file, FIFO or `-`.
        place: returns the current position for messages; empty at the beginning.
        unpack: see `read_chunks`, also for `expected`.
        expected: see `unpack`.
        is_kept: all of it will be in memory or on disk, so a stream is limited as well. Lines may come for ever.
    """
    name = describe(path)
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise DataError("Standard input is closed; name a file, or give the text through a pipe.")
            yield _readers(cast(io.BufferedReader, sys.stdin.buffer), name, unpack, is_kept)
        else:
            with open_stream(Path(path)) as file:
                yield _readers(file, name, unpack, is_kept)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        reason = str(error).rstrip(".")
        raise DataError(
            f"{name} begins like a gzip file but is cut off or damaged {place() or 'at its beginning'}: {reason}."
            " Copy or pack it once more."
        ) from None
    except IsADirectoryError:
        raise DataError(f"{name} is a directory; {expected} was expected.") from None
    except OSError as error:
        raise DataError(f"Cannot read {name}: {error.strerror or error}.") from None
    except ValueError as error:  # a NUL inside the path
        raise DataError(f"Cannot read {name}: {error}.") from None


def _readers(file: io.BufferedReader, name: str, unpack: bool, is_kept: bool) -> tuple[_Read, _CanRead]:
    head = file.read1(len(GZIP_MAGIC)) if unpack else b""
    if head == GZIP_MAGIC[:1]:
        head += file.read1(1)
    stream = _Pushed(head, file)
    if head != GZIP_MAGIC:
        endless = is_kept and not _is_regular(file)
        return _limited(stream.read, name, "has") if endless else stream.read, stream.can_read
    # The decompressor does not tell whether it has data, so packed text is read in full blocks.
    unpacked = gzip.GzipFile(fileobj=cast(IO[bytes], stream), mode="rb")
    return _limited(unpacked.read1, name, "unpacks to"), lambda seconds: True


def _is_regular(file: io.BufferedReader) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # no file behind the stream
        return False


def _limited(read: _Read, name: str, verb: str) -> _Read:
    """Return `read`, which refuses what comes after the limit."""
    most, given = _most_bytes, 0

    def read_within(size: int) -> bytes:
        nonlocal given
        content = read(size)
        given += len(content)
        if given > most:
            raise DataError(
                f"{name} {verb} more than {most:,} bytes. If that is right, allow more by --max-input-bytes N."
            )
        return content

    return read_within
