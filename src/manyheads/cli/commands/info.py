"""`manyheads info PATH`: what is in a model, a run or prepared data."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.records import describe_folder
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError

__all__ = ["PAGE", "InfoOptions", "lines_of", "run"]

PACKED = ("config", "decoding", "environment", "counts")
"""Records of many small values."""


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
        from manyheads.cli.commands.info_length import predict

        return predict(options.path, options.length, options.batch, as_json=options.json)
    if options.batch is not None:
        raise ConfigError("--batch is how many sequences of --length are read at once; give --length with it.")
    record = describe_folder(options.path, verify=options.verify)
    print(json.dumps(record, ensure_ascii=False, indent=2) if options.json else "\n".join(lines_of(record)))
    return 2 if record.get("damaged") else 0


def lines_of(record: dict[str, Any], indent: str = "") -> list[str]:
    """A record as `name  value` lines; inner records indented below their names, settings packed into few lines."""
    known = {name: value for name, value in record.items() if value is not None}
    if known.get("last_validation") == known.get("best"):
        known.pop("last_validation", None)
    width = max((len(name) for name, value in known.items() if not isinstance(value, dict)), default=0)
    lines = []
    for name, value in known.items():
        shown = name.replace("_", " ")
        if not isinstance(value, dict):
            lines.append(f"{indent}{shown:<{width}}  {_shown(name, value)}".rstrip())
        elif name in PACKED:
            lines += [f"{indent}{shown}", *_packed(value, f"{indent}  ")]
        elif value:
            lines += [f"{indent}{shown}", *lines_of(value, f"{indent}  ")]
    return lines


def _packed(record: dict[str, Any], indent: str) -> list[str]:
    """All plain values in a paragraph, then a paragraph for each inner record."""
    inner = {name: value for name, value in record.items() if isinstance(value, dict)}
    plain = {name: value for name, value in record.items() if name not in inner}
    width = max(map(len, inner), default=0)
    lines = _paragraph("", plain, indent)
    for name, values in inner.items():
        flat = {key: value.get("kind") if isinstance(value, dict) else value for key, value in values.items()}
        lines += _paragraph(f"{name:<{width}}  ", flat, indent)
    return lines


def _paragraph(lead: str, values: dict[str, Any], indent: str) -> list[str]:
    text = ", ".join(f"{name}\0{_shown(name, value)}".replace(" ", "\0") for name, value in values.items())
    wrapped = textwrap.wrap(
        text,
        min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120),
        initial_indent=indent + lead,
        subsequent_indent=indent + " " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in wrapped]  # a name and its value stay on one line


def _shown(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and name not in ("seed", "format_version"):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_shown(name, item) for item in value) or "none"
    return str(value)
