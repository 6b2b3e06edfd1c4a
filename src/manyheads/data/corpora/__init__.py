"""Corpora that are part of the package, each with its attribution beside it.

English-German pairs: 60,000 for training, 500 for validation, 1,000 for test; `extras/sources/cut_tatoeba.py` selects
them. A novel of 1,159,819 bytes of UTF-8 with curly quotes: the first 90 percent are for training, the next 5 for
validation, the last 5 for test.
"""

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

NUM_TRAIN = 60_000

# SHA-256 of each unpacked file; the packed bytes depend on the version of zlib
DIGESTS = {
    "train": "354abbe43e53eae15b82316ec972fd15fb2eaa5a6d18a13a1cb25145e33cc388",
    "valid": "74ab997472bf0cc3f14965ddcb9a2ca51238e117eeefc5a0493b8a59555735ea",
    "test": "bd2b18943fb50d24cd5173a9a20f7232b9c25cddcf4a733541515080bc9788cf",
}
NOVEL_DIGEST = "c4d63bce8518705e6538faf9662e4dc47e4006636dfc5d932acefc34370e0a6c"  # SHA-256 of the unpacked file


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


def load_tatoeba(split: str) -> list[tuple[str, str]]:
    """Return the (English, German) pairs of a split.

    Args:
        split: `train`, `valid` or `test`.

    Raises: DataError: the installed file is missing or damaged.
    """
    content = read_embedded(f"tatoeba-en-de.{split}.tsv.gz", DIGESTS[split])
    pairs = []
    for line in content.decode("utf-8").removesuffix("\n").split("\n"):
        source, target = line.split("\t")
        pairs.append((source, target))
    return pairs


def load_novel() -> dict[str, bytes]:
    """Return the text of each split: `train`, `valid` and `test`.

    Raises: DataError: the installed file is missing or damaged.
    """
    return cut_novel(read_embedded("crime-and-punishment.txt.gz", NOVEL_DIGEST))


def cut_novel(text: bytes) -> dict[str, bytes]:
    """Return 90, 5 and 5 percent of the text; each cut moves to the beginning of the next paragraph."""
    bounds = [0, *(_paragraph_after(text, len(text) * twentieths // 20) for twentieths in (18, 19)), len(text)]
    names = ("train", "valid", "test")
    return {name: text[bounds[number] : bounds[number + 1]] for number, name in enumerate(names)}


def _paragraph_after(text: bytes, place: int) -> int:
    place = text.index(b"\n\n", place)
    return place + len(text[place:]) - len(text[place:].lstrip(b"\n"))
