"""Data of the recipes by name: addresses, the page that gives them, terms, and what its publisher states of the files.

An address stands here only with a page that gives it, and a sum only if the publisher states it there. `verified` is
the date on which the files were fetched from there by this code; empty: that was not tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from manyheads.config.checks import did_you_mean
from manyheads.errors import ConfigError, DataError
from manyheads.extras.sources import fetching
from manyheads.extras.sources.storage import ADDRESS, check_storage, is_address

SPLITS = ("train", "valid", "test")
KINDS = ("url:", "hf:", "sacrebleu:", "opus:", "mtdata:")


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


@dataclass(frozen=True)
class Wanted:
    """A SOURCE of a command line. split: which part of it is wanted. entry: if it is a name. option: its option."""

    text: str
    split: str
    option: str
    entry: Entry | None = None
    name: str = ""

    @property
    def kind(self) -> str:
        """One of KINDS; or ADDRESS, as in s3://bucket/folder; or empty: a file or folder of this disk."""
        other = ADDRESS if is_address(self.text) else ""
        return next((kind for kind in KINDS if self.text.startswith(kind)), other)

    @property
    def rest(self) -> str:
        return self.text.removeprefix(self.kind)

    @property
    def urls(self) -> list[str]:
        return self.rest.split(",") if self.kind == "url:" else []


def wanted_of(texts: Sequence[str], split: str, option: str) -> list[Wanted]:
    """Return the sources of an option, names replaced by what they stand for.

    Raises: ConfigError: one is unknown, or is not fetched.
    """
    return [_wanted(text, split, option) for text in texts]


def _wanted(text: str, split: str, option: str) -> Wanted:
    entry = ENTRIES.get(text)
    if entry is not None:
        if entry.instead:
            raise ConfigError(f"{option} {text}: {entry.instead}.")
        source = entry.splits.get(split, entry.splits["train"])
        return replace(_wanted(source, split, option), entry=entry, name=text)
    one = Wanted(text, split, option)
    if one.kind == "sacrebleu:" and split == "train":
        raise ConfigError(
            f"--from {text} is a test set, and a model that has seen it cannot be judged by it; --valid-from and"
            " --test-from take it."
        )
    if one.kind == "url:":
        for url in one.urls:
            try:
                fetching.check_address(url)
            except DataError as error:
                raise ConfigError(f"{option}: {error}") from None
        if len(one.urls) > 2:
            raise ConfigError(f"{option} {text}: url: takes one address, or two, source,target.")
    if one.kind == ADDRESS:
        check_storage(text, option)
    if not one.kind and not Path(text).exists():
        known = [*ENTRIES, *KINDS]
        hint = did_you_mean(text.partition(":")[0] + (":" if ":" in text else ""), known)
        raise ConfigError(
            f"{option} {text} is unknown: it is no file or folder, no name ({', '.join(ENTRIES)}), and begins with none"
            f" of {' '.join(KINDS)} and SCHEME://.{hint}"
        )
    return one


def check_terms(sources: Sequence[Wanted], accepted: Sequence[str]) -> None:
    """Raises: ConfigError: terms were not accepted, or no source has the name that was."""
    asked = {one.name: one.entry for one in sources if one.entry is not None and one.entry.terms}
    for name, entry in asked.items():
        if name not in accepted and entry is not None:
            raise ConfigError(f"{name} has terms: {entry.terms}. Read them, then give --accept-terms {name}.")
    for name in accepted:
        if name not in asked:
            raise ConfigError(
                f"--accept-terms {name}: no source of this command has terms of this name.{did_you_mean(name, asked)}"
            )


def plan_lines(sources: Sequence[Wanted], lock: fetching.Lock) -> list[str]:
    """Return what would be fetched, a line for each file; nothing is sent for it."""
    lines = []
    for one in sources:
        lines.append(f"{one.option} {one.name or one.text}")
        if one.entry is not None:
            lines.append(f"  {one.entry.summary}; page: {one.entry.page}; {said_of(one.entry)}")
            if one.entry.terms:
                lines.append(f"  terms, accepted by --accept-terms {one.name}: {one.entry.terms}")
        for url in one.urls:
            size = lock.files.get(url, {}).get("bytes")
            state = "in the cache" if fetching.is_cached(url) else "to be fetched"
            lines.append(f"  {url}: {state}, {f'{size:,} bytes' if isinstance(size, int) else 'size unknown'}")
        if one.kind in _PROGRAMS:
            lines.append(f"  {one.text}: fetched by {_PROGRAMS[one.kind]}, size unknown")
    return lines


_PROGRAMS = {
    "hf:": "huggingface_hub", "opus:": "mtdata", "mtdata:": "mtdata", "sacrebleu:": "sacrebleu", ADDRESS: "fsspec",
}  # fmt: skip


def said_of(entry: Entry) -> str:
    """Return when an entry was tried."""
    return f"verified: {entry.verified}" if entry.verified else "not tried"
