"""Readable text of a record: the output of `info` and `doctor`."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Any

_PACKED = ("config", "decoding", "environment", "counts")
"""Records of many small values."""


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
        elif name in _PACKED:
            lines += [f"{indent}{shown}", *_packed(value, f"{indent}  ")]
        elif value:
            lines += [f"{indent}{shown}", *lines_of(value, f"{indent}  ")]
    return lines


def _packed(record: dict[str, Any], indent: str) -> list[str]:
    """Return one paragraph with all plain values, then a paragraph for each inner record."""
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
