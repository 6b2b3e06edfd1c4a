"""The default decoding options in a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from manyheads.config.build import build
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ModelFileError
from manyheads.files.guarded import read_limited

__all__ = ["load_settings", "read_settings"]


T = TypeVar("T")
_MOST_BYTES = 4 << 20


def load_settings(folder: Path) -> DecodingSettings:
    """Return the settings in a translator's folder; see `read_settings`."""
    return read_settings(folder, DecodingSettings)


def read_settings(folder: Path, kind: type[T]) -> T:
    """Return the settings in `folder/generation_config.json`, or the defaults if there is no such file.

    Args: kind: the dataclass of the settings, for a search or a generator.

    Raises: ModelFileError: the file cannot be read or is not one JSON object. ConfigError: an unknown or bad option.
    """
    file = folder / "generation_config.json"
    try:
        values = json.loads(read_limited(file, _MOST_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{file} must hold one JSON object, not a {type(values).__name__}.")
    return build(kind, values, str(file))
