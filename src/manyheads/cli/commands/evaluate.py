"""`manyheads evaluate MODEL`: scores on held-out data, and everything they depend on. Each task has its own options."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.cli.command_line.task_pages import pages_of, parse_for_task
from manyheads.cli.lines.output import LineWriter, check_files
from manyheads.cli.process import printable, set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.decoding.text_ids import tell_bad_lines
from manyheads.files.verify import json_text

PAGES = pages_of("evaluate")


def run(arguments: Sequence[str]) -> int:
    """Evaluate. Returns: the exit code."""
    set_up_machine()
    task, options = parse_for_task("evaluate", arguments)
    options.run_on.announce()
    if options.output is not None:
        check_files(options.output, *options.inputs)
    with showing_if_long() as progress:
        report = task.module("evaluate").evaluate(options, progress)
    if report is None:
        return 0  # the main rank has the results of all ranks
    if options.output is not None:
        with LineWriter(options.output) as writer:
            writer.write(report.output)
    with LineWriter("-") as writer:
        if options.json:
            writer.write([json_text(report.to_json(), indent=2)])
        else:
            writer.write(map(printable, report.to_lines()))
    # Pages and pictures come last: one that cannot be written must not cost the figures.
    report.save()
    tell_bad_lines(report.read)
    return 0
