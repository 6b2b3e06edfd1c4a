"""Whole texts as training data for language models: several files in order, as bytes or as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from manyheads.data.byte_lines import read_chunks
from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe, refuse_packed
from manyheads.errors import ConfigError

BLOCK_BYTES = 2**20
MOST_NAMED = 3
LONGEST_MAGIC = 16  # number of first bytes that identify a packed file


class Text(Protocol):
    """The input of a split of a language model's data: `TextFiles` or `TextBlock`."""

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """Yield blocks of bytes in order, and whether a file ends with each.

        Args:
            as_bytes: the unchanged bytes; otherwise lines of UTF-8, each with its "\\n".
            report: counts lines that are not UTF-8.
        """

    def describe(self) -> str: ...


@dataclass(frozen=True)
class TextBlock:
    """A text in memory, with a name for the manifest; it counts as one file."""

    name: str
    content: bytes

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """Yield all of it. The content is UTF-8 in either case; as lines, a last line gets its line break."""
        content = self.content if as_bytes or self.content.endswith(b"\n") else self.content + b"\n"
        yield content, True

    def describe(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files in a given order.

    Args: paths: at least one; `-` is standard input.

    Raises: ConfigError: there is no path, or standard input is named twice.
    """

    paths: Sequence[str | Path]
    needed: ClassVar[str] = "A text needs at least one file."

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError(self.needed)
        if [str(path) for path in self.paths].count("-") > 1:
            raise ConfigError("Standard input can be read once, but two files are -.")

    def describe(self) -> str:
        """Return the names of the files, for messages and manifests: the first few, and the number of others."""
        names = [describe(path) for path in self.paths[:MOST_NAMED]]
        more = f" and {len(self.paths) - MOST_NAMED} more" if len(self.paths) > MOST_NAMED else ""
        return " + ".join(names) + more


@dataclass(frozen=True, kw_only=True)
class TextFiles(Files):
    """The text of files, plain or gzip.

    Args:
        paths: see `Files`.
        on_bad_utf8: for lines that are not UTF-8: `fail`, `replace` bad bytes by U+FFFD, or `skip` the line; counted.
            Not used if the bytes are read unchanged.
    """

    on_bad_utf8: OnBadUtf8 = "fail"

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """See `Text.read`.

        Raises: DataError: a file cannot be read or decoded; file, line and byte offset are named.
        """
        report = report if report is not None else ReadReport()
        for path in self.paths:
            blocks = _unchanged(path) if as_bytes else self._lines(path, report)
            for block in blocks:
                yield block, False
            yield b"", True

    def _lines(self, path: str | Path, report: ReadReport) -> Iterator[bytes]:
        block: list[bytes] = []
        size = 0
        for line in decoded_lines(path, self.on_bad_utf8, report):
            if line is None:
                report.bad_utf8_skipped += 1
                continue
            block.append(line.encode("utf-8") + b"\n")
            size += len(block[-1])
            if size >= BLOCK_BYTES:
                yield b"".join(block)
                block, size = [], 0
        if block:
            yield b"".join(block)


def _unchanged(path: str | Path) -> Iterator[bytes]:
    head = b""
    chunks = read_chunks(path)
    while len(head) < LONGEST_MAGIC and (chunk := next(chunks, b"")):  # a first block can be two bytes long
        head += chunk
    refuse_packed(head[:LONGEST_MAGIC], describe(path))
    yield head
    yield from chunks
