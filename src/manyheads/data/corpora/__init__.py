"""Corpora that are part of the package, each with its attribution beside it."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from importlib.resources import files

from manyheads.errors import DataError

_TATOEBA = (
    "of tatoeba.org by way of www.manythings.org/anki, by many authors, CC BY 2.0 FR"
    " (https://creativecommons.org/licenses/by/2.0/fr/), selected and grouped by the authors of manyheads"
)
NOTICES = {
    "embedded:tatoeba-en-de": f"English-German sentence pairs {_TATOEBA}",
    "embedded:tatoeba-languages": f"English and German sentences {_TATOEBA}",
    "embedded:crime-and-punishment": (
        "Crime and Punishment by Fyodor Dostoevsky, translated by Constance Garnett, in the public domain in the United"
        " States and, as far as is known, elsewhere"
    ),
}
"""Source and licence of each embedded corpus, by its name in settings; model cards contain them."""


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
