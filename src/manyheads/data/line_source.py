"""Input of commands that write one line per item: the items, in blocks and in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from manyheads.data.lines import OnBadUtf8, ReadReport, read_blocks, read_lines

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
