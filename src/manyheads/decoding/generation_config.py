"""The decoding options that a model folder suggests."""

from __future__ import annotations

import json
from pathlib import Path

from manyheads.config.build import build
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ModelFileError

__all__ = ["load_settings"]


_MOST_BYTES = 4 << 20


def load_settings(folder: Path) -> DecodingSettings:
    """The settings in `folder/generation_config.json`; the defaults if there is no such file.

    Raises: ModelFileError: the file cannot be read or is not one JSON object. ConfigError: an unknown or bad option.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        return DecodingSettings()
    try:
        if not (file.is_file() and file.stat().st_size <= _MOST_BYTES):
            raise ModelFileError(f"{file} is refused: it must be a file of at most {_MOST_BYTES:,} bytes.")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{file} must hold one JSON object, not a {type(values).__name__}.")
    return build(DecodingSettings, values, str(file))
