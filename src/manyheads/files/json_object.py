"""JSON: reading of files that hold one object, of possibly external origin, and writing of records for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from manyheads.errors import ModelFileError
from manyheads.files.safe_open import read_limited

MOST_BYTES = 16 << 20


def read_object(file: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the content of a JSON file.

    Args: most_bytes: a larger file is refused before it is read.

    Raises: FileNotFoundError: there is no file. ModelFileError: it cannot be read, is too large, is not one object, or
        has half a surrogate pair, which no file in UTF-8 can hold.
    """
    try:
        text = read_limited(file, most_bytes).decode("utf-8")
        values = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # an escape of a surrogate, perhaps of a whole pair
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except FileNotFoundError:
        raise
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise ModelFileError(
            f"{file} cannot be read as JSON: a text in it has half a surrogate pair, {half}."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{file} must hold one JSON object, not a {type(values).__name__}.")
    return values


def json_text(record: Any, indent: int | None = None) -> str:
    """Return a record as JSON. NaN and infinity, which JSON does not have, become null."""
    try:
        return json.dumps(record, ensure_ascii=False, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(record), ensure_ascii=False, indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
