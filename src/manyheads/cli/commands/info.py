"""`manyheads info PATH`: what is in a model, a run or prepared data."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.commands.inspect.picture_files import PICTURES
from manyheads.cli.comparison import compare_runs, sorted_rows, table_lines
from manyheads.cli.lines.record import lines_of
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.cli.records import describe_folder
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError
from manyheads.tasks.text.find_config import find_config

__all__ = ["PAGE", "InfoOptions", "run"]


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
        default=None,
        metavar="COLUMN",
        default_is="the order given",
    )
    curves: str | None = option(
        "Also draw the learning curves of all runs in one picture: a .png, .svg or .pdf file.",
        default=None,
        metavar="FILE",
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

    @property
    def path(self) -> Path:
        """The only path. Raises: ConfigError: there are several."""
        if len(self.paths) > 1:
            raise ConfigError(f"--length and --verify take one PATH, but {len(self.paths)} were given.")
        return self.paths[0]


PAGE = CommandPage(
    InfoOptions,
    """Show what is in a model's folder, a run's folder or prepared data: parameters by part, settings,
steps, scores, digests. Several runs give one table, with the scores of their best validations.
With --length, what memory training a language model takes, before it is trained.""",
    (
        "manyheads info runs/demo",
        "manyheads info runs/demo/model --json",
        "manyheads info runs/* --sort bleu --curves compared.png",
        "manyheads info reformer-demo --length 16384 --batch 2",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Returns: 0; 2 if --verify finds something damaged."""
    options = parse(PAGE, arguments, "info")
    if options.length is not None:
        say(_memory(options, options.length))
        return 0
    if options.batch is not None:
        raise ConfigError("--batch is how many sequences of --length are read at once; give --length with it.")
    if options.sort is not None or options.curves is not None or (len(options.paths) > 1 and not options.verify):
        _compare(options)
        return 0
    record = describe_folder(options.path, verify=options.verify)
    if options.json:
        print(json.dumps(record, ensure_ascii=False, indent=2))
    else:
        say("\n".join(lines_of(record)))
    return 2 if record.get("damaged") else 0


def _compare(options: InfoOptions) -> None:
    """Print the table of several runs, and draw their curves."""
    if options.curves is not None and Path(options.curves).suffix[1:].lower() not in PICTURES:
        raise ConfigError(f"--curves {options.curves}: it must end in .{', .'.join(PICTURES)}.")
    rows = compare_runs(options.paths)
    if options.sort is not None:
        rows = sorted_rows(rows, options.sort)
    if options.json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
    else:
        say("\n".join(table_lines(rows)))
    if options.curves is not None:
        from manyheads.visualise.compared_curves import compared_curves_figure
        from manyheads.visualise.curves import read_metrics
        from manyheads.visualise.figure import save_figure

        metrics = {str(path): path / "metrics.jsonl" for path in options.paths}
        records = {name: read_metrics(file) if file.is_file() else [] for name, file in metrics.items()}
        path = Path(options.curves)
        [written] = save_figure(compared_curves_figure(records), path, [path.suffix[1:].lower()])
        say(written, file=sys.stderr)


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
    probes, _ = record.pop("probes"), record.pop("overhead")
    record = {"path": str(options.path), **record, "total_bytes": found.total_bytes, "probed_lengths": probes}
    return json.dumps(record, indent=2)
