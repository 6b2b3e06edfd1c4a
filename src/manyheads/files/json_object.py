"""Reading of JSON files that hold one object, of possibly external origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyheads.errors import ModelFileError
from manyheads.files.guarded import read_limited

__all__ = ["MOST_BYTES", "read_object"]

MOST_BYTES = 16 << 20


def read_object(file: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the content of a JSON file.

    Args: most_bytes: a larger file is refused before it is read.

    Raises: FileNotFoundError: there is no file. ModelFileError: it cannot be read, is too large, or is not one object.
    """
    try:
        values = json.loads(read_limited(file, most_bytes).decode("utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{file} must hold one JSON object, not a {type(values).__name__}.")
    return values
