"""Reading of JSON files that hold one object, of possibly external origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyheads.errors import ModelFileError
from manyheads.files.guarded import read_limited

__all__ = ["read_object"]

_MOST_BYTES = 16 << 20


def read_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file.

    Raises: FileNotFoundError: there is no file. ModelFileError: it cannot be read, is too large, or is not one object.
    """
    try:
        values = json.loads(read_limited(file, _MOST_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{file} must hold one JSON object, not a {type(values).__name__}.")
    return values
