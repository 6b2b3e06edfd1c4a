"""A table that compares several runs: their settings and their best scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyheads.catalogue import HOOKS, load
from manyheads.cli.records import describe_folder
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.suggest import did_you_mean
from manyheads.errors import ConfigError

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
    with showing_if_long() as show:
        for number, path in enumerate(paths):
            show("reading runs", number, len(paths))
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
    with showing_if_long() as show:
        for number, path in enumerate(paths):
            show("reading curves", number, len(paths))
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
