"""`manyheads info PATH`: the contents of a model, a run or prepared data."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from manyheads.catalogue import HOOKS, load
from manyheads.cli.command_line.command import command
from manyheads.cli.comparison import compare_runs, draw_curves, sorted_rows, table_lines
from manyheads.cli.lines.record import lines_of
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say, say_or_json
from manyheads.cli.records import describe_folder
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, Shared, argument, option, refuse_given
from manyheads.errors import ConfigError
from manyheads.tasks.language_modelling.find_config import find_config


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Options of `manyheads info`."""

    paths: tuple[Path, ...] = argument(
        "A run's folder, a model's, or prepared data; several runs are compared in one table; with --length also a file"
        " of settings, or a preset's name.",
        metavar="PATH",
    )
    sort: str | None = option(
        "With several runs: order the table by this column, the best first: bleu, valid_nll, minutes ...",
        metavar="COLUMN",
        default_is="the order given",
    )
    curves: str | None = option(
        "Also draw the learning curves of all runs in one picture: a .png, .svg or .pdf file.",
        default=None,
        metavar="FILE",
    )
    length: int | None = option(
        "For a language model: predict the memory of training with segments of N tokens.",
        default=None,
        metavar="N",
    )
    batch: int | None = option(
        "With --length: number of sequences in a batch.", metavar="N", default_is="the run's lanes"
    )
    verify: bool = option(
        "Compare every file with its SHA-256 (in a run: checkpoints and model); exit code 2 if one is damaged.",
        default=False,
    )
    json: bool = Shared.json("Print JSON.")

    def __post_init__(self) -> None:
        table = {"--sort": self.sort, "--curves": self.curves}
        if self.verify:
            others = {**table, "--length": self.length is not None}
            refuse_given(others, "--verify compares files with their SHA-256; leave out {}.")
        if self.length is not None:
            refuse_given(table, "--length predicts the memory of one training; leave out {}.")

    @property
    def path(self) -> Path:
        """The only path. Raises: ConfigError: there are several."""
        if len(self.paths) > 1:
            raise ConfigError(f"--length and --verify take one PATH, but {len(self.paths)} were given.")
        return self.paths[0]


PAGE = CommandPage(
    InfoOptions,
    """Show the contents of a model folder, a run folder or prepared data: parameters by part, settings, steps, scores,
digests. Several runs give one table, with the scores of their best validations. With --length it predicts how much
memory the training of a language model needs.""",
    (
        "manyheads info runs/demo",
        "manyheads info runs/demo/model --json",
        "manyheads info runs/* --sort bleu --curves compared.png",
        "manyheads info reformer-demo --length 16384 --batch 2",
    ),
)


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
    with showing_if_long() as show:
        show(f"reading {options.path}", 0, 0)
        record = describe_folder(options.path, verify=options.verify)
    say_or_json(record, "\n".join(lines_of(record)), as_json=options.json)
    return 2 if record.get("damaged") else 0


def _compare(options: InfoOptions) -> None:
    """Print the table of several runs, and draw their curves."""
    if options.curves is not None:
        load(HOOKS["check pictures"])([options.curves], given_by="--curves")
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
    from manyheads.training.plan.planner import Planner

    with showing_if_long() as show:
        found = Planner(config).memory(length, options.batch, show)
    say_or_json({"path": str(options.path), **found.to_json()}, found.describe(), as_json=options.json)
