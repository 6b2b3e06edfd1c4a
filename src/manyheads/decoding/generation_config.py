"""The default decoding options in a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from manyheads.config.build import build
from manyheads.decoding.settings import DecodingSettings
from manyheads.files.json_object import read_object

__all__ = ["load_settings", "read_settings"]


T = TypeVar("T")


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
        values = read_object(file)
    except FileNotFoundError:
        return kind()
    return build(kind, values, str(file), "decoding" if kind is DecodingSettings else "generation")
