"""Corpora that are part of the package, each with its attribution beside it."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from importlib.resources import files

from manyheads.errors import DataError


def read_embedded(name: str, sha256: str) -> bytes:
    """Return the unpacked content of a file in this folder.

    Raises: DataError: the file is missing, or its unpacked content has another SHA-256.
    """
    try:
        content = gzip.decompress(files(__name__).joinpath(name).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"The embedded corpus {name} cannot be read ({error}); install manyheads again.") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"The embedded corpus {name} is damaged; install manyheads again.")
    return content
