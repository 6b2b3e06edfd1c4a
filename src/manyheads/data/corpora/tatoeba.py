"""The embedded English-German pairs: 60,000 for training, 500 for validation, 1,000 for test.

Sentences from tatoeba.org by way of www.manythings.org/anki, CC BY 2.0 FR. `cut_tatoeba` describes their selection.
"""

from __future__ import annotations

from manyheads.data.corpora import read_embedded

NUM_TRAIN = 60_000

# SHA-256 of each unpacked file; the packed bytes depend on the version of zlib
DIGESTS = {
    "train": "354abbe43e53eae15b82316ec972fd15fb2eaa5a6d18a13a1cb25145e33cc388",
    "valid": "74ab997472bf0cc3f14965ddcb9a2ca51238e117eeefc5a0493b8a59555735ea",
    "test": "bd2b18943fb50d24cd5173a9a20f7232b9c25cddcf4a733541515080bc9788cf",
}


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
