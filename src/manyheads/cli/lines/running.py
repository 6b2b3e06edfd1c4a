"""One loop for commands that read lines and write lines: in this process, or on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from manyheads.cli.lines.output import LineWriter
from manyheads.cli.lines.sharding import blocks_of, is_sharded, run_sharded
from manyheads.data.lines import OnBadUtf8, ReadReport, read_blocks, read_lines

if TYPE_CHECKING:
    from manyheads.cli.watching.phases import Phases

__all__ = ["GivenItems", "LinesOf", "run_lines"]

T = TypeVar("T")


class Source(Protocol[T]):
    """What a command reads. files: their names. report: what was found in them."""

    files: Sequence[str]
    report: ReadReport

    def blocks(self, *, full: bool) -> Iterator[list[T]]:
        """The input from its beginning. full: every block but the last has all its items, however slowly they come."""
        ...


class LinesOf:
    """The lines of a file.

    Args:
        file: its name; `-` is standard input.
        size: lines in a block.
        on_bad_utf8: see `data.lines`.
    """

    def __init__(self, file: str, size: int, on_bad_utf8: OnBadUtf8 = "fail") -> None:
        self.files: Sequence[str] = [file]
        self.report = ReadReport()
        self._size = size
        self._on_bad_utf8 = on_bad_utf8

    def blocks(self, *, full: bool) -> Iterator[list[str]]:
        """See `Source.blocks`."""
        self.report = ReadReport()  # several ranks read the file twice, and count once
        [file] = self.files
        if full:
            lines = read_lines(file, on_bad_utf8=self._on_bad_utf8, report=self.report)
            return blocks_of(lines, self._size)
        return read_blocks(file, self._size, on_bad_utf8=self._on_bad_utf8, report=self.report)


class GivenItems(Generic[T]):
    """Items that were read before.

    Args:
        items: all of them.
        size: items in a block.
        files: where they come from.
        report: what was found in the files.
    """

    def __init__(self, items: Sequence[T], size: int, files: Sequence[str], report: ReadReport) -> None:
        self.files = files
        self.report = report
        self._items = items
        self._size = size

    def blocks(self, *, full: bool) -> Iterator[list[T]]:
        """See `Source.blocks`."""
        return blocks_of(self._items, self._size)


def run_lines(
    source: Source[T],
    work: Callable[[int, list[T]], Iterable[str]],
    *,
    output: str,
    identity: Callable[[], Mapping[str, Any]],
    show: Phases | None = None,
) -> bool:
    """Write the output lines of every block, in order.

    Args:
        source: what is read.
        work: number of the block's first item, from 0, and the block -> its lines.
        output: a file; `-` is standard output.
        identity: what the lines depend on besides the input, as plain data; several ranks resume only equal work.
        show: the progress display, hidden while lines are written to the same terminal.

    Returns: whether this process is the one that reports what was found in the input (`source.report`).
    Raises: ConfigError: several ranks would share standard input or output. RankLostError: a rank is lost.
    """
    if is_sharded(output):
        return run_sharded(output, source.files, identity(), lambda: source.blocks(full=True), work) is not None
    awaits = "-" in source.files  # the writer of the pipe may take its time
    first = 0
    with LineWriter(output) as writer:
        if show is not None and awaits:
            show.rest()
        for block in source.blocks(full=False):
            lines = work(first, block)
            if show is None:
                writer.write(lines)
            else:
                with show.hidden(writer.is_in_terminal):
                    writer.write(lines)
                if awaits:
                    show.rest()
            first += len(block)
    return True
