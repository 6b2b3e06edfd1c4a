"""Data of the recipes by name: addresses, the page that gives them, terms, and what its publisher states of the files.

An address stands here only with a page that gives it, and a sum only if the publisher states it there. `verified` is
the date on which the files were fetched from there by this code; empty: that was not tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Entry:
    """A corpus.

    splits: split -> SOURCE, as `--from` takes it; one SOURCE under `train` alone has all splits in it. page: gives the
    addresses. terms: to be accepted, and where they are; empty: none. sums: name of a file, also inside an archive ->
    algorithm and digest that the page states. verified: a date; empty: not tried. instead: where to get what is not
    fetched.
    """

    summary: str
    page: str
    splits: Mapping[str, str] = field(default_factory=dict)
    terms: str = ""
    sums: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    verified: str = ""
    instead: str = ""


_MULTI30K = "https://github.com/multi30k/dataset"
_CAPTIONS = f"{_MULTI30K}/raw/master/data/task1/raw"
_WMT14 = "https://nlp.stanford.edu/projects/nmt"
_TEXTS = "http://mattmahoney.net/dc/textdata.html"


def _captions(source: str, target: str) -> Entry:
    files = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    return Entry(
        f"Multi30k, captions of images, {source} > {target}",
        _MULTI30K,
        {split: f"url:{_CAPTIONS}/{name}.{source}.gz,{_CAPTIONS}/{name}.{target}.gz" for split, name in files.items()},
        terms=f"for research; the images' and captions' terms are on {_MULTI30K}",
    )


def _licensed(name: str, number: str) -> Entry:
    return Entry(
        f"{name}, licensed by the Linguistic Data Consortium",
        f"https://catalog.ldc.upenn.edu/{number}",
        instead=f"it is licensed by the LDC and not fetched; it is at https://catalog.ldc.upenn.edu/{number}",
    )


ENTRIES: Mapping[str, Entry] = {
    "multi30k-en-de": _captions("en", "de"),
    "multi30k-en-fr": _captions("en", "fr"),
    "wmt14-en-de": Entry(
        "WMT 2014, English to German, tokenised",
        f"{_WMT14}/",
        {
            split: f"url:{_WMT14}/data/wmt14.en-de/{name}.en,{_WMT14}/data/wmt14.en-de/{name}.de"
            for split, name in {"train": "train", "valid": "newstest2013", "test": "newstest2014"}.items()
        },
    ),
    "enwik8": Entry(
        "the first 100 million bytes of a dump of the English Wikipedia",
        _TEXTS,
        {"train": "url:https://mattmahoney.net/dc/enwik8.zip"},
        sums={"enwik8": ("sha1", "57b8363b814821dc9d47aa4d41f58733519076b2")},
    ),
    "text8": Entry(
        "100 million letters and spaces of the English Wikipedia",
        _TEXTS,
        {"train": "url:https://mattmahoney.net/dc/text8.zip"},
    ),
    "lm1b": Entry(
        "One Billion Word Benchmark",
        "https://www.statmt.org/lm-benchmark/",
        {
            "train": "url:https://www.statmt.org/lm-benchmark/"
            "1-billion-word-language-modeling-benchmark-r13output.tar.gz"
        },
        terms="the news texts belong to their publishers; the terms are on https://www.statmt.org/lm-benchmark/",
    ),
    "wikitext-2": Entry(
        "WikiText-2, words",
        "https://huggingface.co/datasets/Salesforce/wikitext",
        {"train": "hf:Salesforce/wikitext[wikitext-2-v1]"},
    ),
    "wikitext-103": Entry(
        "WikiText-103, words",
        "https://huggingface.co/datasets/Salesforce/wikitext",
        {"train": "hf:Salesforce/wikitext[wikitext-103-v1]"},
    ),
    "ptb": _licensed("Penn Treebank", "LDC99T42"),
    "wsj": _licensed("the Wall Street Journal part of the Penn Treebank", "LDC99T42"),
    "iwslt": Entry(
        "IWSLT, talks",
        "https://wit3.fbk.eu",
        terms="the talks are for research and not for commerce, CC BY-NC-ND",
        instead="its files lie where only a browser gets them; fetch them by hand and give their folder to --from",
    ),
}
"""Names that `--from`, `--valid-from` and `--test-from` take."""
