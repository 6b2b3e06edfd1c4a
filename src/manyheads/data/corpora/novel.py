"""The embedded novel: Crime and Punishment by Fyodor Dostoevsky, translated by Constance Garnett; public domain.

1,159,819 bytes of UTF-8 with curly quotes. The first 90 percent are for training, the next 5 for validation, the last 5
for test.
"""

from __future__ import annotations

from manyheads.data.corpora import read_embedded

NOVEL_DIGEST = "c4d63bce8518705e6538faf9662e4dc47e4006636dfc5d932acefc34370e0a6c"  # SHA-256 of the unpacked file


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
