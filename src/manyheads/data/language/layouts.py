"""The corpora on which language models are compared, in the form in which they are published: files, units and splits.

Papers: WikiText, Merity et al. 2016, arXiv:1609.07843; enwik8 and text8, Mahoney 2006 (splits as in Al-Rfou et
al. 2018, arXiv:1808.04444); Penn Treebank, Mikolov et al. 2010 (10,000 words, others <unk>); One Billion Word
Benchmark, Chelba et al. 2013, arXiv:1312.3005.
Nothing is downloaded; the files must be on disk, plain or gzip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyheads.data.preparing import Holdout
from manyheads.errors import DataError

_BILLION = "1-billion-word-language-modeling-benchmark-r13output"
_HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout"
_TRAINING = "training-monolingual.tokenized.shuffled/news.en"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A corpus.

    Args:
        files: for each split the possible names of its files, in the order of preference; `*` matches several files.
        vocabulary: fields of `VocabularySettings` for this corpus.
        holdout: the part of a single file that is validation and test text.
        tokens: number of tokens of each split in the literature.
        inside: subfolders that can contain the files.
    """

    files: Mapping[str, tuple[str, ...]]
    vocabulary: Mapping[str, Any]
    holdout: Holdout | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoundLayout:
    """The files of a layout on this disk."""

    layout: Layout
    paths: Mapping[str, list[Path]]


def _wikitext(tokens: int) -> Layout:
    return Layout(
        files={split: (f"wiki.{split}.tokens", f"{split}.txt") for split in ("train", "valid", "test")},
        vocabulary={"level": "words"},
        tokens={"train": tokens, "valid": 217_646, "test": 245_569},
    )


def _hundred_million(name: str) -> Layout:
    return Layout(
        files={"train": (name,)},
        vocabulary={"level": "bytes"},
        holdout=Holdout(valid=5_000_000, test=5_000_000, whole=100_000_000),
        tokens={"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000},
    )


LAYOUTS: dict[str, Layout] = {
    "wikitext-2": _wikitext(2_088_628),
    "wikitext-103": _wikitext(103_227_021),
    "ptb": Layout(
        files={split: (f"ptb.{split}.txt", f"{split}.txt") for split in ("train", "valid", "test")},
        vocabulary={"level": "words"},
        tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
        inside=("simple-examples/data", "data"),
    ),
    "enwik8": _hundred_million("enwik8"),
    "text8": _hundred_million("text8"),
    # The official script uses one held-out file as both validation and test text; here they are two files.
    "lm1b": Layout(
        files={
            "train": (f"{_TRAINING}-*-of-00100",),
            "valid": (f"{_HELD_OUT}-00001-of-00050",),
            "test": (f"{_HELD_OUT}-00000-of-00050",),
        },
        vocabulary={"level": "words", "documents": "lines", "line_end": "<S>", "min_count": 3},
        inside=(_BILLION,),
    ),
}


def find_layout(name: str, path: str | Path) -> FoundLayout:
    """Return the files of a corpus.

    Args:
        name: one of `LAYOUTS`.
        path: the folder that contains them, or the file if the corpus is one file.

    Raises: DataError: a file is missing; the message gives the names that were tried.
    """
    layout, path = LAYOUTS[name], Path(path)
    if path.exists() and not path.is_dir() and len(layout.files) == 1:
        return FoundLayout(layout, {"train": [path]})
    folders = [path, *(path / inside for inside in layout.inside)]
    paths: dict[str, list[Path]] = {}
    for split, names in layout.files.items():
        wanted = [wanted for plain in names for wanted in (plain, f"{plain}.gz")]
        tried = (sorted(folder.glob(one)) for folder in folders for one in wanted)
        paths[split] = next((found for found in tried if found), [])
        if not paths[split]:
            raise DataError(
                f"{path} does not hold {name}: there is no {' or '.join(wanted)} in it. Unpack the corpus there, name"
                " its folder, or give the files by --corpus, --valid-corpus and --test-corpus without --layout."
            )
    return FoundLayout(layout, paths)
