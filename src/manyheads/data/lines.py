"""Lines of text files: UTF-8, plain or gzip, cut at "\\n" and nowhere else.

`str.splitlines` also cuts at U+2028, U+0085 and others that stand inside real sentences; it would shift one language
against the other. So lines are cut while they are still bytes.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

from manyheads.errors import DataError

__all__ = ["MAX_LINE_BYTES", "OnBadUtf8", "ReadReport", "decoded_lines", "read_lines"]

OnBadUtf8 = Literal["fail", "replace", "skip"]
MAX_LINE_BYTES = 64 * 2**20
GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16 (little-endian)", b"\xfe\xff": "UTF-16 (big-endian)"}


@dataclass
class ReadReport:
    """What readers met on the way; counts only grow, so one report may serve several files.

    Attributes:
        lines: lines (of pairs: pairs of lines) read.
        bad_utf8_replaced: lines with bad bytes, each of which became U+FFFD.
        bad_utf8_skipped: lines or pairs left out because of bad bytes.
        line_breaks_replaced: pairs whose JSON text held line breaks, which became spaces.
    """

    lines: int = 0
    bad_utf8_replaced: int = 0
    bad_utf8_skipped: int = 0
    line_breaks_replaced: int = 0


class _Rejoined(io.RawIOBase):
    """A stream that cannot be rewound (pipe, FIFO), with the bytes already taken from it put back in front."""

    def __init__(self, head: bytes, rest: io.BufferedReader) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]  # any writable buffer
        if self._head:
            part, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        else:
            part = self._rest.read1(len(buffer))  # what is there now: a person at the keyboard waits for no full block
        buffer[: len(part)] = part
        return len(part)


@contextmanager
def opened(path: str | Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, of a FIFO, or of standard input for `-`; unpacked if they begin as gzip does.

    Raises: DataError: the file cannot be opened or read.
    """
    name = describe(path)
    try:
        if str(path) == "-":
            yield _unpacked(cast(io.BufferedReader, sys.stdin.buffer))
        else:
            with Path(path).open("rb") as file:
                yield _unpacked(file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{name} begins like a gzip file but is cut off or damaged: {error}.") from None
    except IsADirectoryError:
        raise DataError(f"{name} is a directory; a text file was expected.") from None
    except OSError as error:
        raise DataError(f"Cannot read {name}: {error.strerror or error}.") from None
    except ValueError as error:  # a NUL inside the path
        raise DataError(f"Cannot read {name}: {error}.") from None


def _unpacked(file: io.BufferedReader) -> IO[bytes]:
    head = file.read1(len(GZIP_MAGIC))
    if head == GZIP_MAGIC[:1]:
        head += file.read1(1)
    stream: IO[bytes] = io.BufferedReader(_Rejoined(head, file), 2**20)
    if head == GZIP_MAGIC:
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream, mode="rb"), 2**20)
    return stream


def describe(path: str | Path) -> str:
    """How messages call a path."""
    return "standard input" if str(path) == "-" else str(path)


def decoded_lines(path: str | Path, on_bad_utf8: OnBadUtf8, report: ReadReport) -> Iterator[str | None]:
    """Each line without its "\\n" or "\\r\\n"; None in the place of a line that is skipped for its bad bytes.

    A byte order mark at the beginning is dropped, and a last line needs no "\\n".

    Raises: DataError: the file cannot be read, a line is longer than MAX_LINE_BYTES, or bytes are bad under `fail`.
    """
    name = describe(path)
    offset = 0
    number = 0
    with opened(path) as file:
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise DataError(
                    f"{name}: line {number}, at byte {offset}, is longer than {MAX_LINE_BYTES} bytes;"
                    ' lines must end in "\\n".'
                )
            start = offset
            offset += len(raw)
            if number == 1:
                _refuse_utf16(raw, name)
                if raw.startswith(b"\xef\xbb\xbf"):
                    raw, start = raw[3:], 3
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                if on_bad_utf8 == "fail":
                    raise DataError(_bad_utf8_message(name, number, start, error)) from None
                if on_bad_utf8 == "skip":
                    yield None
                    continue
                report.bad_utf8_replaced += 1
                text = raw.decode("utf-8", "replace")
            yield text.removesuffix("\n").removesuffix("\r")


def _refuse_utf16(raw: bytes, name: str) -> None:
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if raw.startswith(mark):
            raise DataError(
                f"{name} begins with the byte order mark of {encoding}; convert it: iconv -f UTF-16 -t UTF-8."
            )


def _bad_utf8_message(name: str, number: int, start: int, error: UnicodeDecodeError) -> str:
    bad = error.object[error.start]
    return (
        f"{name}: line {number} is not UTF-8: byte 0x{bad:02x} at byte offset {start + error.start} ({error.reason})."
        " Convert the file (for example: iconv -f WINDOWS-1252 -t UTF-8), or choose --on-bad-utf8 replace or skip."
    )


def read_lines(path: str | Path, *, on_bad_utf8: OnBadUtf8 = "fail", report: ReadReport | None = None) -> Iterator[str]:
    """The lines of one file (`-` is standard input), plain or gzip, one string for each line whatever happens.

    Args:
        path: file, FIFO or `-`.
        on_bad_utf8: `fail`, `replace` bad bytes by U+FFFD, or `skip`, which gives an empty line in the line's place.
        report: counts what was replaced or skipped.

    Raises: DataError: the file cannot be read or decoded.
    """
    report = report if report is not None else ReadReport()
    for line in decoded_lines(path, on_bad_utf8, report):
        report.lines += 1
        if line is None:
            report.bad_utf8_skipped += 1
        yield line or ""
