"""`manyheads score MODEL`: the model's log-probabilities of given translations or texts.

Each task has its own options.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.cli.command_line.task_pages import pages_of, parse_for_task
from manyheads.cli.lines.output import check_files, write_lines
from manyheads.cli.process import set_up_machine
from manyheads.cli.watching.phases import showing_if_long

PAGES = pages_of("score")


def run(arguments: Sequence[str]) -> int:
    """Score lines. Returns: the exit code."""
    set_up_machine()
    task, options = parse_for_task("score", arguments)
    check_files(options.output, *options.inputs)
    with showing_if_long() as progress:
        write_lines(task.module("score").score(options, progress), options.output, progress)
    return 0
