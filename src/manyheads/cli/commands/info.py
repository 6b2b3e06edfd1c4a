"""`manyheads info PATH`: what is in a model, a run or prepared data."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from manyheads.cli.command_line.info_options import PAGE, InfoOptions
from manyheads.cli.command_line.parsing import parse
from manyheads.cli.commands.inspect.picture_files import check_kinds
from manyheads.cli.comparison import compare_runs, draw_curves, sorted_rows, table_lines
from manyheads.cli.lines.record import lines_of
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.cli.records import describe_folder
from manyheads.cli.watching.phases import showing_if_long
from manyheads.errors import ConfigError
from manyheads.tasks.text.find_config import find_config

__all__ = ["PAGE", "run"]


def run(arguments: Sequence[str]) -> int:
    """Returns: 0; 2 if --verify finds something damaged."""
    options = parse(PAGE, arguments, "info")
    if options.length is not None:
        _predict_memory(options, options.length)
        return 0
    if options.batch is not None:
        raise ConfigError("--batch is how many sequences of --length are read at once; give --length with it.")
    if options.sort is not None or options.curves is not None or (len(options.paths) > 1 and not options.verify):
        _compare(options)
        return 0
    record = describe_folder(options.path, verify=options.verify)
    _print(record, "\n".join(lines_of(record)), options)
    return 2 if record.get("damaged") else 0


def _compare(options: InfoOptions) -> None:
    """Print the table of several runs, and draw their curves."""
    check_kinds([] if options.curves is None else [options.curves], given_by="--curves")
    rows = compare_runs(options.paths)
    if options.sort is not None:
        rows = sorted_rows(rows, options.sort)
    _print(rows, "\n".join(table_lines(rows)), options)
    if options.curves is not None:
        say(draw_curves(options.paths, Path(options.curves)), file=sys.stderr)


def _predict_memory(options: InfoOptions, length: int) -> None:
    """Print the predicted memory of training. length: tokens of a segment."""
    config = find_config(options.path)
    set_up_machine()
    from manyheads.tasks.runs import planner

    with showing_if_long() as show:
        found = planner(config).memory(length, options.batch, show)
    _print({"path": str(options.path), **found.to_json()}, found.describe(), options)


def _print(record: object, text: str, options: InfoOptions) -> None:
    if options.json:
        print(json.dumps(record, ensure_ascii=False, indent=2))
    else:
        say(text)
