"""Cut the embedded slice of Tatoeba from the whole English-German file.

    python -m manyheads.extras.sources.cut_tatoeba eng-deu.tsv.gz

Translations overlap: one English sentence can have many German ones, and vice versa. Therefore pairs are grouped first,
and a group belongs to one split only. No sentence of the test or validation pairs occurs in training, on either side.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from manyheads.data import corpora
from manyheads.data.translation.readers import PairFiles
from manyheads.errors import DataError

Pair = tuple[str, str]

NUM_TEST, NUM_VALID = 1_000, 500
FEWEST_WORDS, MOST_WORDS = 4, 20


def group_pairs(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Return groups of pairs that share a side, directly or through other pairs, in the order of first occurrence."""
    parent: dict[Pair, Pair] = {}

    def find(node: Pair) -> Pair:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    known = list(pairs)
    for source, target in known:
        parent[find(("target", target))] = find(("source", source))
    groups: dict[Pair, list[Pair]] = {}
    for pair in known:
        groups.setdefault(find(("source", pair[0])), []).append(pair)
    return list(groups.values())


def cut(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Return the slice: `test`, `valid` and `train` pairs.

    The first English sentence of a group decides: the group is kept if the sentence has 4 to 20 words (at white space),
    and groups are sorted by its SHA-256. The test set consists of the first pair of each of the first 1,000 groups, and
    the validation set of the first pair of each of the next 500, so that no two are similar. All pairs of the following
    groups, up to 60,000, are for training.

    Raises: DataError: there are too few pairs.
    """
    groups = [group for group in group_pairs(pairs) if FEWEST_WORDS <= len(group[0][0].split()) <= MOST_WORDS]
    groups.sort(key=lambda group: hashlib.sha256(group[0][0].encode("utf-8")).digest())
    held_out = NUM_TEST + NUM_VALID
    train = [pair for group in groups[held_out:] for pair in group][: corpora.NUM_TRAIN]
    if len(train) < corpora.NUM_TRAIN:
        raise DataError(
            f"Only {len(train)} training pairs are left of {len(groups)} groups; {corpora.NUM_TRAIN} are needed."
        )
    return {
        "test": [group[0] for group in groups[:NUM_TEST]],
        "valid": [group[0] for group in groups[NUM_TEST:held_out]],
        "train": train,
    }


def pack(pairs: Iterable[Pair]) -> bytes:
    """Return the pairs as gzipped TSV; the same version of zlib always gives the same bytes."""
    text = "".join(f"{source}\t{target}\n" for source, target in pairs)
    return gzip.compress(text.encode("utf-8"), 9, mtime=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the three files and print the SHA-256 of the unpacked content of each."""
    parser = argparse.ArgumentParser(description="Cut the embedded slice of Tatoeba.")
    parser.add_argument("whole", type=Path, help="eng-deu.tsv.gz, the whole English-German file")
    parser.add_argument("--into", type=Path, default=Path(corpora.__file__).parent, help="folder for the three files")
    chosen = parser.parse_args(arguments)
    for split, pairs in cut(PairFiles(tsv=chosen.whole).read()).items():
        packed = pack(pairs)
        (chosen.into / f"tatoeba-en-de.{split}.tsv.gz").write_bytes(packed)
        sys.stdout.write(f"{split} {len(pairs)} {hashlib.sha256(gzip.decompress(packed)).hexdigest()}\n")


if __name__ == "__main__":
    main()
