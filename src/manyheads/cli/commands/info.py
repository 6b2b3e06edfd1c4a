"""`manyheads info PATH`: the contents of a model, a run or prepared data, or a table that compares several runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyheads.catalogue import HOOKS, PRESETS, RUNS, load
from manyheads.cli.command_line.parsing import command
from manyheads.cli.lines.output import lines_of
from manyheads.cli.process import echo, say_or_json, set_up_machine
from manyheads.cli.records import describe_folder
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.build import resolve
from manyheads.config.checks import did_you_mean
from manyheads.config.files import load_yaml
from manyheads.config.options import CommandPage, Shared, argument, option, refuse_given
from manyheads.errors import ConfigError
from manyheads.tasks.language_modelling.settings import TextConfig

_LARGER_IS_BETTER = ("bleu", "chrf", "f1", "accuracy")
_LOSSES = ("valid_nll", "perplexity", "bits_per_byte", "bits_per_character", "bits_per_dim")
_SCORES = (*_LOSSES, *_LARGER_IS_BETTER)
_PART = "of_the_first"
"""Number of sentences or tokens, if the scores are of a part."""
_COLUMNS = ("run", "data", "architecture", "parameters", "step", "epoch", "tokens", "minutes", *_SCORES, _PART)


def compare_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each run, in the order of the paths; the scores are those of its best validation.

    Raises: ConfigError: a path is no run. ModelFileError: a folder cannot be read.
    """
    rows = []
    with showing_if_long() as progress:
        for number, path in enumerate(paths):
            progress("reading runs", number, len(paths))
            record = describe_folder(path, is_brief=True)
            if record["kind"] != "run":
                raise ConfigError(f"{path} is no run but {record['kind']}; only runs can be compared. Leave it out.")
            rows.append(_row(path, record))
    return rows


def sorted_rows(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return the rows with the best first: the largest BLEU, chrF, F1 or accuracy, otherwise the smallest value.

    Rows without the value are last.

    Raises: ConfigError: there is no such column.
    """
    key = key.replace("-", "_")
    shown = _used(rows)
    if key not in shown:
        raise ConfigError(f"--sort is {key!r}; these runs have {', '.join(shown)}.{did_you_mean(key, shown)}")
    known = sorted((row for row in rows if row.get(key) is not None), key=lambda row: row[key])
    if key in _LARGER_IS_BETTER:
        known.reverse()
    return known + [row for row in rows if row.get(key) is None]


def table_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows as a table with a heading; columns that no row has are left out."""
    columns = _used(rows)
    cells = [list(columns), *([_shown(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    is_text = [any(isinstance(row.get(name), str) for row in rows) for name in columns]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in cells
    ]


def draw_curves(paths: Sequence[Path], picture: Path) -> Path:
    """Draw the learning curves of all runs in one picture, whose ending selects its format. Returns: its path."""
    from manyheads.training.record.log import Metrics

    records = {}
    with showing_if_long() as progress:
        for number, path in enumerate(paths):
            progress("reading curves", number, len(paths))
            file = path / "metrics.jsonl"
            records[str(path)] = Metrics(file).read() if file.is_file() else []
    written: tuple[Path, ...] = load(HOOKS["picture"])("curves of runs", picture, records).save()
    return written[0]


def _row(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    config = record["config"]
    model, best = record.get("model") or {}, record["best"] or record["last_validation"] or {}
    row = {
        "run": str(path),
        "data": _section(config, "data").get("path"),
        "architecture": model.get("architecture") or _section(config, "model").get("architecture"),
        "parameters": model.get("parameters"),
        "step": record["step"],
        "epoch": record["epoch"],
        "tokens": record["target_tokens"],
        "minutes": record["minutes"],
    }
    return row | {name: best.get(name) for name in (*_SCORES, _PART)}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _used(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


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
    with showing_if_long() as progress:
        progress(f"reading {options.path}", 0, 0)
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
        echo(draw_curves(options.paths, Path(options.curves)), file=sys.stderr)


def _predict_memory(options: InfoOptions, length: int) -> None:
    """Print the predicted memory of training. length: tokens of a segment."""
    config = find_config(options.path)
    set_up_machine()
    with showing_if_long() as progress:
        found = load(HOOKS["planner"])(config).memory(length, options.batch, progress)
    say_or_json({"path": str(options.path), **found.to_json()}, found.describe(), as_json=options.json)


def find_config(path: Path) -> TextConfig:
    """Return the training settings that a path names.

    Args: path: the folder of a run or a model, a YAML file of settings, or the name of a preset.

    Raises: ConfigError: the path names none of these, or what it names belongs to another task.
    """
    run_file = path / "config.yaml" if path.is_dir() else path
    if (path / "config.json").is_file():
        from manyheads.models.pretrained import read_config

        model = read_config(path)
        _check_language_model(path, model.architecture)
        return replace(TextConfig(), model=model)
    if run_file.is_file():
        source = load_yaml(run_file, may_be_pipe=run_file == path)
        section = source.values.get("model")
        known = section if isinstance(section, dict) else {}
        _check_language_model(path, known.get("architecture", "transformer"))
        return resolve(TextConfig, [source])
    presets: dict[str, Any] = {name: make() for name, make in PRESETS.items()}
    if str(path) in presets:
        config = presets[str(path)]
        _check_language_model(path, config.model.architecture)
        return config  # type: ignore[no-any-return]
    names = [name for name, config in presets.items() if RUNS[config.model.architecture] is TextConfig]
    raise ConfigError(
        f"{path} is neither a run, a model, a file of settings nor a preset; the presets of language models are"
        f" {', '.join(names)}."
    )


def _check_language_model(path: Path, architecture: object) -> None:
    if RUNS.get(str(architecture)) is not TextConfig:
        raise ConfigError(
            f"{path} is a {architecture}, whose batches have sequences of many lengths; --length is of language models."
            " For the memory of a step use `manyheads train --dry-run`."
        )
