"""Whole texts as a source of training data for language models: files, one after the other, as bytes or as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from manyheads.data.byte_lines import read_chunks
from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe, refuse_packed
from manyheads.errors import ConfigError

__all__ = ["Text", "TextBlock", "TextFiles"]

BLOCK_BYTES = 2**20
MOST_NAMED = 3
LONGEST_MAGIC = 16  # bytes by which a packed file is known


class Text(Protocol):
    """Where a split of a language model's data comes from: `TextFiles` or `TextBlock`."""

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """Blocks of bytes in order, and whether a file ends with each.

        Args:
            as_bytes: as they are; otherwise lines of UTF-8, each with its "\\n".
            report: counts lines that are not UTF-8.
        """
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class TextBlock:
    """A text at hand, with a name for the manifest; one file."""

    name: str
    content: bytes

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """All of it. The content is UTF-8 in either case; a last line gets its line break."""
        content = self.content if as_bytes or self.content.endswith(b"\n") else self.content + b"\n"
        yield content, True

    def describe(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """The text of some files, plain or gzip, in the order given.

    Args:
        paths: at least one; `-` is standard input.
        on_bad_utf8: what happens to a line that is not UTF-8: `fail`, `replace` its bad bytes by U+FFFD, or `skip` it;
            counted. Has no meaning where bytes are read as they are.

    Raises: ConfigError: there is no path, or standard input is named twice.
    """

    paths: Sequence[str | Path]
    on_bad_utf8: OnBadUtf8 = "fail"

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("A text needs at least one file.")
        if [str(path) for path in self.paths].count("-") > 1:
            raise ConfigError("Standard input can be read once, but two files of a text are -.")

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """See `Text.read`.

        Raises: DataError: a file cannot be read or decoded; file, line and byte offset are named.
        """
        report = report if report is not None else ReadReport()
        for path in self.paths:
            blocks = _as_they_are(path) if as_bytes else self._lines(path, report)
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

    def describe(self) -> str:
        """The files' names, for messages and manifests; of many the first few and their number."""
        names = [describe(path) for path in self.paths[:MOST_NAMED]]
        more = f" and {len(self.paths) - MOST_NAMED} more" if len(self.paths) > MOST_NAMED else ""
        return " + ".join(names) + more


def _as_they_are(path: str | Path) -> Iterator[bytes]:
    kept = b""  # a first block may be two bytes long
    known = False
    for block in read_chunks(path):
        kept += block
        if not known and len(kept) < LONGEST_MAGIC:
            continue
        if not known:
            refuse_packed(kept[:LONGEST_MAGIC], describe(path))
            known = True
        yield kept
        kept = b""
    if kept:
        refuse_packed(kept, describe(path))
        yield kept
