"""`run_lines` with an output file and a progress display, for commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from manyheads.cli.lines.output import LineWriter
from manyheads.data.line_source import Source
from manyheads.distributed import sharded_lines
from manyheads.distributed.place import find_place

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
    """Write the output lines of every block to a file; see `sharded_lines.run_lines`.

    Args:
        output: a file; `-` is standard output.
        show: the progress display. It is hidden while lines are written to the same terminal, and while input is
            awaited from a pipe.

    Returns: whether this process is the one that reports what was found in the input (`source.report`).
    """
    awaits = show is not None and "-" in source.files
    writer = LineWriter(output)

    def write(lines: list[str]) -> None:
        if show is None:
            writer.write(lines)
            return
        with show.hidden(writer.is_in_terminal):
            writer.write(lines)
        if awaits:
            show.rest()

    with ExitStack() as stack:
        if find_place().is_main:
            stack.enter_context(writer)  # also creates the output of an empty input
        if show is not None and awaits:
            show.rest()
        return sharded_lines.run_lines(source, work, write, output=output, identity=identity)
