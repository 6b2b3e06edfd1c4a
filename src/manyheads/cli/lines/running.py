"""The loop of commands that write a line for each line of their input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manyheads.cli.lines.output import LineWriter
from manyheads.cli.process import StoppedBySystem, echo
from manyheads.data.lines import Source
from manyheads.decoding.truncation import counted_truncations, naming_lines, tell_bad_lines
from manyheads.distributed import sharded_lines
from manyheads.distributed.process import this_process
from manyheads.files.output_safety import check_spares_folders

if TYPE_CHECKING:
    from manyheads.cli.watching.phases import Phases
    from manyheads.tasks.report import LineWork

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

    From files to a file, finished blocks are kept until all are there, and the same command continues after a kill.

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

    resumable = is_resumable(output, *source.files)

    def continued(count: int) -> None:
        echo(f"manyheads: continued after line {count:,}, from {output}.shards", file=sys.stderr)

    with ExitStack() as stack:
        if this_process().is_main:
            stack.enter_context(writer)  # also creates the output of an empty input
        if show is not None and waits:
            show.rest()
        stack.enter_context(telling_what_is_kept(output, resumable))
        return sharded_lines.run_lines(
            source, work, write, output=output, identity=identity, resumable=resumable, continued=continued
        )


def is_resumable(output: str, *inputs: str) -> bool:
    """Return whether finished blocks can be kept: the inputs can be read again, and the output is an ordinary file.

    Raises: ConfigError: the folder of the blocks is one of a model or of prepared data.
    """
    if "-" in (output, *inputs) or not inputs or not all(Path(path).is_file() for path in inputs):
        return False
    if Path(output).exists() and not Path(output).is_file():
        return False
    check_spares_folders(Path(f"{output}.shards"), is_folder=True)
    return True


@contextmanager
def telling_what_is_kept(output: str, resumable: bool) -> Iterator[None]:
    """Say where the finished part is if the command is stopped within the block."""
    try:
        yield
    except (KeyboardInterrupt, StoppedBySystem):
        if resumable and Path(f"{output}.shards").is_dir():
            kept = f"the finished part is in {output}.shards; the same command continues from there."
            echo(f"manyheads: {kept}", file=sys.stderr)
        raise
