"""Variations of one recipe, trained in turn with several seeds, as a table.

    python recipes/ablation.py recipes/ablations/table-3.yaml --work runs/ablation

The file names a recipe (`base`), the number of updates, the seeds, and rows of changed settings. Every row and seed is
a run of its own below WORK, judged on the validation part of its data. A finished run is a line of WORK/results.jsonl
and is not repeated; a stopped one goes on from its last checkpoint when the command is given again. After each run the
table is written to WORK/table.md: means over the seeds, and half the distance between the best and the worst.

`--updates 20` tries every row; such results are kept apart, in WORK/results-20.jsonl. `--only base` runs the rows
whose names contain a text. `--report` prints the table of what is finished.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

COMMON = {
    "training.max_minutes": 0,
    "training.plots": False,
    "training.tensorboard": False,
    "training.keep": 2,
    "training.save_every": 250,
    "validation.bleu_sentences": 0,
    "validation.best_by": "loss",
}
"""Settings of every run: it ends after its updates, is saved often, and BLEU is computed once, at the end."""


class MistakeError(Exception):
    """The file of variations cannot be used; the message says why."""


@dataclass(frozen=True)
class Ablation:
    """A file of variations.

    Attributes:
        base: the recipe's file.
        updates: optimiser steps of every run.
        seeds: of every row.
        columns: setting -> symbol, for the table.
        rows: name -> changed settings.
    """

    base: Path
    updates: int
    seeds: tuple[int, ...]
    columns: dict[str, str]
    rows: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Ablation:
        """Read the file. Raises: MistakeError: it cannot be read, or its contents are of another form."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise MistakeError(f"{path} cannot be read: {error}.") from None
        keys = {"base", "updates", "seeds", "columns", "rows"}
        if not isinstance(content, dict) or set(content) != keys:
            raise MistakeError(f"{path} must have the keys {', '.join(sorted(keys))}, and no others.")
        rows, seeds, updates = content["rows"], content["seeds"], content["updates"]
        if not (isinstance(rows, dict) and rows and all(isinstance(row, dict) for row in rows.values())):
            raise MistakeError(f"{path}: rows must be names with changed settings, such as 'one head: {{...}}'.")
        if not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
            raise MistakeError(f"{path}: seeds is {seeds!r}; it must be a list of whole numbers.")
        if type(updates) is not int or updates < 1:
            raise MistakeError(f"{path}: updates is {updates!r}; it must be a whole number from 1.")
        if not isinstance(content["columns"], dict):
            raise MistakeError(f"{path}: columns must be settings with their symbols.")
        base = path.parent / str(content["base"])
        if not base.is_file():
            raise MistakeError(f"{path}: base is {content['base']}, and there is no file {base}.")
        return cls(base, updates, tuple(seeds), content["columns"], rows)


def options_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as options of `manyheads train`."""
    return [part for name, value in settings.items() for part in (f"--{name}", json.dumps(value).strip('"'))]


def manyheads(*arguments: str) -> str:
    """Run a command; its messages go to standard error. Returns: what it printed. Raises: MistakeError: it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "manyheads", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise MistakeError(f"manyheads {' '.join(arguments)}: exit code {done.returncode}; see above.")
    return done.stdout


def measure(ablation: Ablation, row: str, seed: int, updates: int, work: Path) -> dict[str, Any]:
    """Train one row with one seed, or go on with it, and judge it on its validation data."""
    run = work / "runs" / f"{re.sub('[^a-z0-9]+', '-', row.lower())}-{seed}-{updates}"
    settings = {**COMMON, "training.max_steps": updates, "validation.every_steps": updates, **ablation.rows[row]}
    manyheads(
        "train", "--config", str(ablation.base), "--run-dir", str(run), "--seed", str(seed), "--quiet",
        *options_of(settings),
    )  # fmt: skip
    report = json.loads(manyheads("evaluate", str(run), "--split", "valid", "--tokenize", "none", "--json"))
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    shown = {name: _setting(config, name) for name in ablation.columns}
    return {
        "row": row, "seed": seed, "updates": updates, "settings": shown, "bleu": report["bleu"]["score"],
        "perplexity": report["likelihood"]["perplexity"], "parameters": report["protocol"]["parameters"],
        "changes": ablation.rows[row],
    }  # fmt: skip


def _setting(config: Any, name: str) -> Any:
    """Return a setting of config.yaml; d_k and d_v are d_model / num_heads where they are not given."""
    for part in name.split("."):
        config, parent = config.get(part), config
    if config is None and name in ("model.head_dim", "model.value_dim"):
        return parent["d_model"] // parent["num_heads"]
    return config


def table(ablation: Ablation, records: Sequence[Mapping[str, Any]]) -> str:
    """Return the finished rows in Markdown. As in the paper, a cell that equals the base's is empty."""
    lines = [f"| row | {' | '.join([*ablation.columns.values(), 'perplexity', 'BLEU', 'parameters', 'seeds'])} |"]
    lines.append("|---|" + "---:|" * (len(ablation.columns) + 4))
    base: dict[str, Any] = {}
    for row in ablation.rows:
        found = [record for record in records if record["row"] == row]
        if not found:
            continue
        settings = found[0]["settings"]
        cells = [f"{value:g}" if value != base.get(name) else "" for name, value in settings.items()]
        cells += [_mean_and_spread([one[name] for one in found]) for name in ("perplexity", "bleu")]
        lines.append(f"| {row} | {' | '.join(cells)} | {found[0]['parameters'] / 1e6:.2f} M | {len(found)} |")
        base = base or settings
    return "\n".join(lines) + "\n"


def _mean_and_spread(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f} ± {(max(values) - min(values)) / 2:.2f}"


def finished(results: Path) -> list[dict[str, Any]]:
    """Return the records of a file. A last line that was only begun is not counted, and is removed."""
    if not results.is_file():
        return []
    *lines, rest = results.read_text(encoding="utf-8").split("\n")
    if rest:
        results.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [json.loads(line) for line in lines]


def is_of(record: Mapping[str, Any], ablation: Ablation, updates: int) -> bool:
    """Whether a result is that of a row as the file has it now; one of older settings or updates is not."""
    changes = ablation.rows.get(record["row"])
    return changes is not None and record["updates"] == updates and record.get("changes", changes) == changes


def main() -> int:
    """See the module. Returns: 2 after a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="of variations, such as recipes/ablations/table-3.yaml")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs, results and the table")
    parser.add_argument("--updates", type=int, help="of every run; default: the file's")
    parser.add_argument("--only", default="", help="rows whose names contain this text")
    parser.add_argument("--report", action="store_true", help="only print the table")
    options = parser.parse_args()
    try:
        run_all(Ablation.read(options.file), options)
    except MistakeError as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 2
    return 0


def run_all(ablation: Ablation, options: argparse.Namespace) -> None:
    """Run what is not finished. Raises: MistakeError: a run failed, or an option is wrong."""
    updates = ablation.updates if options.updates is None else options.updates
    if updates < 1:
        raise MistakeError(f"--updates is {updates}; give at least 1.")
    rows = [row for row in ablation.rows if options.only in row]
    if not rows:
        raise MistakeError(f"no row contains {options.only!r}; the rows are: {'; '.join(ablation.rows)}.")
    options.work.mkdir(parents=True, exist_ok=True)
    results = options.work / ("results.jsonl" if options.updates is None else f"results-{updates}.jsonl")
    records = [record for record in finished(results) if is_of(record, ablation, updates)]
    done = {(record["row"], record["seed"]) for record in records}
    todo = [(row, seed) for seed in ablation.seeds for row in rows if (row, seed) not in done]
    for number, (row, seed) in enumerate([] if options.report else todo, 1):
        print(f"{number} of {len(todo)}: {row}, seed {seed}", file=sys.stderr, flush=True)
        records.append(measure(ablation, row, seed, updates, options.work))
        with results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(records[-1]) + "\n")
        (options.work / "table.md").write_text(table(ablation, records), encoding="utf-8")
    print(table(ablation, records), end="")


if __name__ == "__main__":
    sys.exit(main())
