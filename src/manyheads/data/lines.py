"""Lines of text files: UTF-8, plain or gzip; lines end at "\\n" only."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyheads.data import byte_lines
from manyheads.data.byte_lines import ByteLines, describe, opened
from manyheads.data.sgm import is_sgm, sgm_segments
from manyheads.errors import DataError
from manyheads.files.guarded import open_regular

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
    if not is_sgm(path):
        yield from _decoded(lines, name, on_bad_utf8, report)
        return
    found = ReadReport() if on_bad_utf8 == "skip" else report
    decoded = _decoded(lines, name, "replace" if on_bad_utf8 == "skip" else on_bad_utf8, found)

    def marked() -> Iterator[tuple[str, bool]]:
        for text in decoded:
            yield text or "", found is not report and found.bad_utf8_replaced > 0
            found.bad_utf8_replaced = 0 if found is not report else found.bad_utf8_replaced

    yield from sgm_segments(marked(), name)


def _decoded(lines: ByteLines, name: str, on_bad_utf8: OnBadUtf8, report: ReadReport) -> Iterator[str | None]:
    offset = 0
    while (raw := lines.next()) is not None:
        start, offset = offset, offset + len(raw) + 1
        if len(raw) > byte_lines.MAX_LINE_BYTES:
            raise DataError(
                f"{name}: line {lines.given}, at byte {start}, is longer than {byte_lines.MAX_LINE_BYTES} bytes;"
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
