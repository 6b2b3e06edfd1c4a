"""What a model is for, told by its folder before anything is imported: commands of one name do it for each kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from manyheads.files.guarded import read_limited

__all__ = ["names_language_model"]

_LANGUAGE = ("transformer-xl", "reformer")
_MOST_BYTES = 1 << 20


def names_language_model(arguments: Sequence[str]) -> bool:
    """Whether the first argument that is a model's or a run's folder holds a language model."""
    for argument in arguments:
        if argument.startswith("-"):
            continue
        for file in (Path(argument) / "model" / "config.json", Path(argument) / "config.json"):
            try:
                record = json.loads(read_limited(file, _MOST_BYTES).decode("utf-8"))
                return isinstance(record, dict) and record.get("architecture") in _LANGUAGE
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError, RecursionError):
                return False  # whoever opens it says what is wrong
    return False
