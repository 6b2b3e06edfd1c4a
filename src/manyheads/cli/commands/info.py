"""`manyheads info PATH`: what is in a model, a run or prepared data."""

from __future__ import annotations

import sys
from pathlib import Path

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.info_options import PAGE, InfoOptions
from manyheads.cli.command_line.inspect_options import check_kinds
from manyheads.cli.comparison import compare_runs, draw_curves, sorted_rows, table_lines
from manyheads.cli.lines.record import lines_of
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say, say_or_json
from manyheads.cli.records import describe_folder
from manyheads.cli.watching.phases import showing_if_long
from manyheads.errors import ConfigError
from manyheads.tasks.text.find_config import find_config

__all__ = ["PAGE", "run"]


@command(PAGE, "info")
def run(options: InfoOptions) -> int:
    """Returns: 0; 2 if --verify finds something damaged."""
    if options.length is not None:
        _predict_memory(options, options.length)
        return 0
    if options.batch is not None:
        raise ConfigError("--batch is how many sequences of --length are read at once; give --length with it.")
    if options.sort is not None or options.curves is not None or (len(options.paths) > 1 and not options.verify):
        _compare(options)
        return 0
    record = describe_folder(options.path, verify=options.verify)
    say_or_json(record, "\n".join(lines_of(record)), as_json=options.json)
    return 2 if record.get("damaged") else 0


def _compare(options: InfoOptions) -> None:
    """Print the table of several runs, and draw their curves."""
    check_kinds([] if options.curves is None else [options.curves], given_by="--curves")
    rows = compare_runs(options.paths)
    if options.sort is not None:
        rows = sorted_rows(rows, options.sort)
    say_or_json(rows, "\n".join(table_lines(rows)), as_json=options.json)
    if options.curves is not None:
        say(draw_curves(options.paths, Path(options.curves)), file=sys.stderr)


def _predict_memory(options: InfoOptions, length: int) -> None:
    """Print the predicted memory of training. length: tokens of a segment."""
    config = find_config(options.path)
    set_up_machine()
    from manyheads.tasks.runs import planner

    with showing_if_long() as show:
        found = planner(config).memory(length, options.batch, show)
    say_or_json({"path": str(options.path), **found.to_json()}, found.describe(), as_json=options.json)
