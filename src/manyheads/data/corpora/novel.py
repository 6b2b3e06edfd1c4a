"""The embedded novel: Crime and Punishment by Fyodor Dostoevsky, translated by Constance Garnett; public domain.

1,159,819 bytes of UTF-8 with curly quotes. Nine tenths train, a twentieth validates, the last one tests.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from importlib.resources import files

from manyheads.errors import DataError

__all__ = ["NOVEL_DIGEST", "cut_novel", "load_novel"]

NAME = "crime-and-punishment.txt.gz"
NOVEL_DIGEST = "c4d63bce8518705e6538faf9662e4dc47e4006636dfc5d932acefc34370e0a6c"  # SHA-256, unpacked


def load_novel() -> dict[str, bytes]:
    """The text of each split: `train`, `valid` and `test`.

    Raises: DataError: the installed file is missing or damaged.
    """
    try:
        content = gzip.decompress(files(__package__).joinpath(NAME).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"The embedded corpus {NAME} cannot be read ({error}); install manyheads again.") from None
    if hashlib.sha256(content).hexdigest() != NOVEL_DIGEST:
        raise DataError(f"The embedded corpus {NAME} is damaged; install manyheads again.")
    return cut_novel(content)


def cut_novel(text: bytes) -> dict[str, bytes]:
    """Nine tenths, a twentieth, a twentieth, each cut moved on to where a paragraph begins."""
    bounds = [0, *(_paragraph_after(text, len(text) * twentieths // 20) for twentieths in (18, 19)), len(text)]
    names = ("train", "valid", "test")
    return {name: text[bounds[number] : bounds[number + 1]] for number, name in enumerate(names)}


def _paragraph_after(text: bytes, place: int) -> int:
    place = text.index(b"\n\n", place)
    return place + len(text[place:]) - len(text[place:].lstrip(b"\n"))
