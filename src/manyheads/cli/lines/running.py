"""The loop of commands that write a line for each line of their input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from manyheads.cli.lines.output import LineWriter
from manyheads.data.line_source import Source
from manyheads.decoding.truncation import counted_truncations, naming_lines, tell_bad_lines
from manyheads.distributed import sharded_lines
from manyheads.distributed.process import this_process

if TYPE_CHECKING:
    from manyheads.cli.watching.phases import Phases
    from manyheads.tasks.report import LineWork

__all__ = ["run_lines", "write_lines"]

T = TypeVar("T")


def write_lines(lines: LineWork[T], output: str, show: Phases | None = None) -> None:
    """Write all lines; then print how many inputs were cut or were not UTF-8. For `output` and `show` see `run_lines`.

    Raises: RequestError: an input does not fit; the message names its file and line.
    """
    with counted_truncations(), naming_lines(**lines.names):
        is_main = run_lines(lines.source, lines.work, output=output, identity=lines.identity, show=show)
    if is_main:
        tell_bad_lines(lines.source.report)


def run_lines(
    source: Source[T],
    work: Callable[[int, list[T]], Iterable[str]],
    *,
    output: str,
    identity: Mapping[str, Any],
    show: Phases | None = None,
) -> bool:
    """Write the output lines of every block to a file; see `sharded_lines.run_lines`.

    Args:
        output: a file; `-` is standard output.
        show: the progress display. It is hidden while lines are written to the same terminal, and while the command
            waits for input from a pipe.

    Returns: whether this process is the one that reports what was found in the input (`source.report`).
    """
    waits = show is not None and "-" in source.files
    writer = LineWriter(output)

    def write(lines: list[str]) -> None:
        if show is None:
            writer.write(lines)
            return
        with show.hidden(writer.is_in_terminal):
            writer.write(lines)
        if waits:
            show.rest()

    with ExitStack() as stack:
        if this_process().is_main:
            stack.enter_context(writer)  # also creates the output of an empty input
        if show is not None and waits:
            show.rest()
        return sharded_lines.run_lines(source, work, write, output=output, identity=identity)
