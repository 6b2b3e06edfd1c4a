"""One loop for commands that read lines and write lines: in this process, or on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from manyheads.cli.lines.output import LineWriter
from manyheads.data.line_source import Source
from manyheads.distributed.sharded_lines import is_sharded, run_sharded

if TYPE_CHECKING:
    from manyheads.cli.watching.phases import Phases

__all__ = ["run_lines"]

T = TypeVar("T")


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
