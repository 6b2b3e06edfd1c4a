"""Lines of text files, FIFOs and standard input: UTF-8, plain or gzip; lines end at "\\n" only.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Generic, Literal, Protocol, TypeVar, cast

from manyheads.catalogue import HOOKS, load
from manyheads.errors import ConfigError, DataError
from manyheads.files.safe_open import open_regular, open_stream

__all__ = [
    "OnBadUtf8",
    "ReadReport",
    "decoded_lines",
    "describe",
    "read_blocks",
    "read_lines",
    "refuse_packed",
    "stored_lines",
]

Progress = Callable[[str, int, int], None]
"""(phase, done, total); total is 0 while it is unknown."""


def phase_progress(progress: Progress, phase: str, total: int, first: int = 0) -> Callable[[int], None]:
    """Begin a phase.

    Args:
        progress: displays it.
        phase: name of the phase.
        total: 0 if it is unknown.
        first: amount that was done before.

    Returns: a function to call with the amount done since then.
    """
    progress(phase, first, total)
    return lambda done: progress(phase, first + done, total)


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
        return limited(stream.read, name, "has") if endless else stream.read, stream.can_read
    # The decompressor does not tell whether it has data, so packed text is read in full blocks.
    unpacked = gzip.GzipFile(fileobj=cast(IO[bytes], stream), mode="rb")
    return limited(unpacked.read1, name, "unpacks to"), lambda seconds: True


def _is_regular(file: io.BufferedReader) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # no file behind the stream
        return False


def limited(read: _Read, name: str, verb: str) -> _Read:
    """Return `read`, which refuses what comes after the limit of `limited_input`."""
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


OnBadUtf8 = Literal["fail", "replace", "skip"]
PAUSE_SECONDS = 0.1
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# First bytes -> kind of the file, and how to convert it. UTF-32 before UTF-16, because their first bytes are the same.
ENCODINGS = {
    b"\xff\xfe\0\0": ("begins with the byte order mark of UTF-32", "convert it: iconv -f UTF-32 -t UTF-8 FILE > NEW"),
    b"\0\0\xfe\xff": ("begins with the byte order mark of UTF-32", "convert it: iconv -f UTF-32 -t UTF-8 FILE > NEW"),
    b"\xff\xfe": ("begins with the byte order mark of UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    b"\xfe\xff": ("begins with the byte order mark of UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
}
PACKED = {
    b"\x1f\x8b\x08": ("is packed twice, inside by gzip", "unpack it once: gzip -dc FILE > NEW"),
    b"\xfd7zXZ\0": ("is an xz file", "unpack it: xz -dc"),
    b"\x28\xb5\x2f\xfd": ("is a zstd file", "unpack it: zstd -dc"),
    b"PK\x03\x04": ("is a zip file", "unpack it: unzip -p"),
    b"7z\xbc\xaf\x27\x1c": ("is a 7z file", "unpack it: 7z e -so"),
}


@dataclass
class ReadReport:
    """Counts of lines and of unusual lines, over one or several files.

    Attributes:
        lines: lines (or pairs of lines) that were read.
        bad_utf8_replaced: lines with bad bytes, which were replaced by U+FFFD.
        bad_utf8_skipped: lines or pairs left out because of bad bytes.
        line_breaks_replaced: pairs whose JSON text contained line breaks, which were replaced by spaces.
        columns_ignored: lines of a TSV with more than two columns; the others were ignored.
        headers_kept: first lines that look like a header and were read as text, because numbers name the columns.
        units_incomplete: units of a TMX file without one of the languages, left out.
        variants_ignored: further variants of a language in the units of a TMX file; the first was used.
        bad_units_replaced: units of a TMX file with characters that XML does not allow, which were replaced.
        bad_units_skipped: units left out because of such characters.
    """

    lines: int = 0
    bad_utf8_replaced: int = 0
    bad_utf8_skipped: int = 0
    line_breaks_replaced: int = 0
    columns_ignored: int = 0
    headers_kept: int = 0
    units_incomplete: int = 0
    variants_ignored: int = 0
    bad_units_replaced: int = 0
    bad_units_skipped: int = 0


def decoded_lines(path: str | Path, on_bad_utf8: OnBadUtf8, report: ReadReport) -> Iterator[str | None]:
    """Yield each line without its "\\n" or "\\r\\n"; None for a line that is skipped because of bad bytes.

    A byte order mark at the beginning is removed, and a last line needs no "\\n". The lines of one of WMT's .sgm files
    are its segments.

    Raises: DataError: the file cannot be read, a line is longer than MAX_LINE_BYTES, or bytes are bad under `fail`.
    """
    with opened(path) as lines:
        yield from _texts(lines, path, on_bad_utf8, report)


def _texts(lines: ByteLines, path: str | Path, on_bad_utf8: OnBadUtf8, report: ReadReport) -> Iterator[str | None]:
    name = describe(path)
    if not str(path).lower().removesuffix(".gz").endswith((".sgm", ".sgml")):
        yield from decoded(lines, name, on_bad_utf8, report)
        return
    found = ReadReport() if on_bad_utf8 == "skip" else report
    texts = decoded(lines, name, "replace" if on_bad_utf8 == "skip" else on_bad_utf8, found)

    def marked() -> Iterator[tuple[str, bool]]:
        for text in texts:
            yield text or "", found is not report and found.bad_utf8_replaced > 0
            found.bad_utf8_replaced = 0 if found is not report else found.bad_utf8_replaced

    yield from load(HOOKS["segments"])(marked(), name)


def decoded(
    lines: ByteLines, name: str, on_bad_utf8: OnBadUtf8, report: ReadReport, offset: int = 0
) -> Iterator[str | None]:
    """Yield each line; see `decoded_lines`. offset: of the first line, in bytes, for messages."""
    while (raw := lines.next()) is not None:
        start, offset = offset, offset + len(raw) + 1
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(
                f"{name}: line {lines.given}, at byte {start}, is longer than {MAX_LINE_BYTES} bytes;"
                ' lines must end in "\\n". Split it, or leave it out.'
            )
        if lines.given == 1:
            _refuse_other_kinds(raw, name)
            if raw == BYTE_ORDER_MARK and lines.unended:
                return  # some editors write an empty file like this
            if raw.startswith(BYTE_ORDER_MARK):
                raw, start = raw.removeprefix(BYTE_ORDER_MARK), len(BYTE_ORDER_MARK)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if on_bad_utf8 == "fail":
                raise DataError(_bad_utf8_message(name, lines.given, start, error)) from None
            if on_bad_utf8 == "skip":
                yield None
                continue
            report.bad_utf8_replaced += 1
            text = raw.decode("utf-8", "replace")
        yield text.removesuffix("\r")


def _refuse_other_kinds(raw: bytes, name: str) -> None:
    """Raise DataError for a first line that is not UTF-8 text but a packed file or another encoding."""
    _refuse_beginnings(raw, name, ENCODINGS)
    refuse_packed(raw, name)
    odd, even = raw[0::2], raw[1::2]
    if len(raw) >= 8 and any(set(half) == {0} and 0 not in other for half, other in ((odd, even), (even, odd))):
        raise DataError(
            f"{name} looks like UTF-16 without a byte order mark: every second byte of its first line is NUL;"
            " convert it: iconv -f UTF-16LE (or UTF-16BE) -t UTF-8 FILE > NEW."
        )


def refuse_packed(beginning: bytes, name: str) -> None:
    """Raise DataError if the first bytes of a file are those of a packed file, which is no training text."""
    _refuse_beginnings(beginning, name, PACKED)
    if beginning.startswith(b"BZh") and beginning[4:10] == b"1AY&SY":  # the digits of pi begin every bzip2 block
        raise DataError(f"{name} is a bzip2 file; unpack it: bzip2 -dc.")


def _refuse_beginnings(raw: bytes, name: str, kinds: dict[bytes, tuple[str, str]]) -> None:
    for beginning, (what, remedy) in kinds.items():
        if raw.startswith(beginning):
            raise DataError(f"{name} {what}; {remedy}.")


def _bad_utf8_message(name: str, number: int, start: int, error: UnicodeDecodeError) -> str:
    bad = error.object[error.start]
    return (
        f"{name}: line {number} is not UTF-8: byte 0x{bad:02x} at byte offset {start + error.start} ({error.reason})."
        " Save the file as UTF-8 (Excel: CSV UTF-8), or convert it (for example: iconv -f WINDOWS-1252 -t UTF-8 FILE >"
        " NEW); commands with --on-bad-utf8 can replace such bytes."
    )


def read_blocks(
    path: str | Path, most: int, *, on_bad_utf8: OnBadUtf8 = "fail", report: ReadReport | None = None
) -> Iterator[list[str]]:
    """Yield the lines of `read_lines` in lists of `most`, or fewer if a pipe has no more at the moment.

    Therefore interactive input, or a log followed by `tail -f`, is processed at once, and a file in full blocks.

    Args:
        path: see `read_lines`, also for the other arguments.
        most: maximum number of lines of a block.
        on_bad_utf8: see `path`.
        report: see `path`.

    Raises: DataError: the file cannot be read or decoded.
    """
    report = report if report is not None else ReadReport()
    block: list[str] = []
    until = 0.0
    with opened(path) as lines:
        for line in _texts(lines, path, on_bad_utf8, report):
            until = until if block else time.monotonic() + PAUSE_SECONDS
            block.append(_noted(line, report))
            if len(block) == most or not lines.ready(max(0.0, until - time.monotonic())):
                yield block
                block = []
        if block:
            yield block


def read_lines(path: str | Path, *, on_bad_utf8: OnBadUtf8 = "fail", report: ReadReport | None = None) -> Iterator[str]:
    """Yield one string for each line of a file, plain or gzip.

    Args:
        path: file, FIFO or `-`, which is standard input.
        on_bad_utf8: `fail`, `replace` bad bytes by U+FFFD, or `skip`, which gives an empty line in its place.
        report: counts the lines, and those replaced or skipped.

    Raises: DataError: the file cannot be read or decoded.
    """
    report = report if report is not None else ReadReport()
    for line in decoded_lines(path, on_bad_utf8, report):
        yield _noted(line, report)


def _noted(line: str | None, report: ReadReport) -> str:
    report.lines += 1
    if line is None:
        report.bad_utf8_skipped += 1
    return line or ""


def stored_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file in prepared data without their "\\n"; a byte order mark and "\\r" are kept.

    Raises: DataError: the file cannot be read, or is damaged.
    """
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {path}: {error}. Prepare the data again.") from None


T = TypeVar("T")


class Source(Protocol[T]):
    """The input of a command. files: their names. report: counts of unusual lines."""

    files: Sequence[str]
    report: ReadReport

    def blocks(self, *, full: bool) -> Iterator[list[T]]:
        """Yield the input from its beginning. full: wait until a block is full, even if the input is slow."""


class LinesOf:
    """The lines of a file.

    Args:
        file: its name; `-` is standard input.
        size: number of lines in a block.
        on_bad_utf8: see `data.lines`.
    """

    def __init__(self, file: str, size: int, on_bad_utf8: OnBadUtf8 = "fail") -> None:
        self.files: Sequence[str] = [file]
        self.report = ReadReport()
        self._size = size
        self._on_bad_utf8 = on_bad_utf8

    def blocks(self, *, full: bool) -> Iterator[list[str]]:
        self.report = ReadReport()  # several ranks read the file twice, but must count it once
        [file] = self.files
        if full:
            lines = read_lines(file, on_bad_utf8=self._on_bad_utf8, report=self.report)
            return blocks_of(lines, self._size)
        return read_blocks(file, self._size, on_bad_utf8=self._on_bad_utf8, report=self.report)


class GivenItems(Generic[T]):
    """Items in memory.

    Args:
        items: all items.
        size: number of items in a block.
        files: names of the files that contained them.
        report: counts of unusual lines in these files.
    """

    def __init__(self, items: Sequence[T], size: int, files: Sequence[str], report: ReadReport) -> None:
        self.files = files
        self.report = report
        self._items = items
        self._size = size

    def blocks(self, *, full: bool) -> Iterator[list[T]]:
        return blocks_of(self._items, self._size)


def blocks_of(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items; the last one can be shorter."""
    rest = iter(things)
    while block := list(islice(rest, size)):
        yield block
