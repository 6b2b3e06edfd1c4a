"""Labelled texts for two recipes: the genres of GUM's sentences, and the languages of Tatoeba's.

    python recipes/labelled_texts.py genres gum-constituency -o genres
    python recipes/labelled_texts.py languages tatoeba -o languages

Each writes train.tsv, valid.tsv and test.tsv, with lines `label<TAB>text`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import sys
from pathlib import Path

# GUM's genres are in the names of its documents (GUM_bio_byron), which a file of joined trees does not contain. But the
# documents are joined in the order of their names, so each genre is a stretch of lines: split -> its last line.
GENRES = ("academic", "bio", "court", "interview", "news", "voyage")
LAST_LINES = {
    "train": (491, 1130, 1534, 2410, 3026, 3707),
    "dev": (52, 115, 212, 303, 367, 438),
    "test": (90, 159, 231, 331, 416, 491),
}
# Of the unpacked files; other versions of the corpus have other lines.
DIGESTS = {
    "train": "6c475b694270f0cd607d2029c9d5eb282c0203dd5c1918c1cd5485cbc4d55c0e",
    "dev": "7cfaef43e1c19ae64aa1df9176a8dfb5eefee04cc39392921b33ddc5962d41c6",
    "test": "ff8abbfa46901f5e4f2549c4d52f9798c718e96f8f9e7dd7dd77fbba974aed72",
}
WORD = re.compile(r"\([^\s()]+ ([^\s()]+)\)")
BRACKETS = {"-LRB-": "(", "-RRB-": ")"}

Rows = list[tuple[str, str]]


def genres(folder: Path) -> dict[str, Rows]:
    """Return split -> (genre, sentence); words have spaces between them, as the trees have them."""
    found = {}
    for split, digest in DIGESTS.items():
        content = gzip.decompress((folder / f"gum.{split}.ptb.gz").read_bytes())
        if hashlib.sha256(content).hexdigest() != digest:
            sys.exit(f"{folder}/gum.{split}.ptb.gz is another version of the corpus, whose genres are on other lines.")
        rows = []
        for number, line in enumerate(content.decode().removesuffix("\n").split("\n"), 1):
            genre = next(name for name, last in zip(GENRES, LAST_LINES[split], strict=True) if number <= last)
            rows.append((genre, " ".join(BRACKETS.get(word, word) for word in WORD.findall(line))))
        found["valid" if split == "dev" else split] = rows
    return found


def languages(folder: Path) -> dict[str, Rows]:
    """Return split -> (language, sentence), each sentence once.

    A hash of the English sentence decides about it and all its translations: 6 of 1,000 are test, 3 validation. A text
    that would be in several splits is in the first of test, valid, train.
    """
    found: dict[str, dict[tuple[str, str], None]] = {"test": {}, "valid": {}, "train": {}}
    for language, name in (("de", "eng-deu.tsv.gz"), ("fr", "eng-fra.tsv.gz")):
        for line in gzip.decompress((folder / name).read_bytes()).decode().removesuffix("\n").split("\n"):
            english, other = line.split("\t")[:2]
            place = int.from_bytes(hashlib.sha256(english.encode()).digest()[:8]) % 1000
            split = found["test" if place < 6 else "valid" if place < 9 else "train"]
            split[("en", english)] = split[(language, other)] = None
    seen: set[str] = set()
    kept: dict[str, Rows] = {}
    for split, rows in found.items():
        kept[split] = [(label, text) for label, text in rows if text not in seen]
        seen |= {text for _, text in rows}
    return kept


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["genres", "languages"])
    parser.add_argument("folder", type=Path, help="the folder of the corpus")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write to")
    options = parser.parse_args()
    splits = (genres if options.kind == "genres" else languages)(options.folder)
    options.output.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        text = "".join(f"{label}\t{text}\n" for label, text in rows)
        (options.output / f"{split}.tsv").write_text(text, encoding="utf-8", newline="\n")
        counts = {label: sum(one == label for one, _ in rows) for label in sorted({label for label, _ in rows})}
        told = ", ".join(f"{label} {count:,}" for label, count in counts.items())
        sys.stdout.write(f"{split}: {len(rows):,} texts: {told}\n")


if __name__ == "__main__":
    main()
