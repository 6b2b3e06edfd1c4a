"""`manyheads info PATH`: what is in a model, a run or prepared data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.record import lines_of
from manyheads.cli.machine import set_up_machine
from manyheads.cli.records import describe_folder
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError
from manyheads.tasks.text.find_config import find_config

__all__ = ["PAGE", "InfoOptions", "run"]


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Options of `manyheads info`."""

    path: Path = argument(
        "A run's folder, a model's, or prepared data; with --length also a file of settings, or a preset's name.",
        metavar="PATH",
    )
    length: int | None = option(
        "Of a language model: predict the memory that training takes at segments of so many tokens.",
        default=None,
        metavar="N",
    )
    batch: int | None = option(
        "With --length: sequences read side by side at once.", default=None, metavar="N", default_is="the run's lanes"
    )
    verify: bool = option(
        "Compare every file with its SHA-256 (in a run: checkpoints and model); exit code 2 if one is damaged.",
        default=False,
    )
    json: bool = option("Print JSON.", default=False)


PAGE = CommandPage(
    InfoOptions,
    """Show what is in a model's folder, a run's folder or prepared data: parameters by part, settings,
steps, scores, digests. With --length, what memory training a language model takes, before it is trained.""",
    (
        "manyheads info runs/demo",
        "manyheads info runs/demo/model --json",
        "manyheads info reformer-demo --length 16384 --batch 2",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Returns: 0; 2 if --verify finds something damaged."""
    options = parse(PAGE, arguments, "info")
    if options.length is not None:
        print(_memory(options, options.length))
        return 0
    if options.batch is not None:
        raise ConfigError("--batch is how many sequences of --length are read at once; give --length with it.")
    record = describe_folder(options.path, verify=options.verify)
    print(json.dumps(record, ensure_ascii=False, indent=2) if options.json else "\n".join(lines_of(record)))
    return 2 if record.get("damaged") else 0


def _memory(options: InfoOptions, length: int) -> str:
    """The predicted memory of training. length: tokens of a segment."""
    config = find_config(options.path)
    set_up_machine()
    from manyheads.tasks.runs import planner

    with showing_if_long() as show:
        found = planner(config).memory(length, options.batch, show)
    if not options.json:
        return found.describe()
    record = asdict(found)
    probes = record.pop("probes")
    record = {"path": str(options.path), **record, "total_bytes": found.total_bytes, "probed_lengths": probes}
    return json.dumps(record, indent=2)
