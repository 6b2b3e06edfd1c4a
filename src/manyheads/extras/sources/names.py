"""A SOURCE of a command line: data of the recipes by name, and addresses of fsspec, such as s3://bucket/folder.

Of a name there are addresses, the page that gives them, terms, and what its publisher states of the files. An address
stands here only with a page that gives it, and a sum only if the publisher states it there. `verified` is the date on
which the files were fetched from there by this code; empty: that was not tried.

Of fsspec, `file:` and `memory:` need nothing more; other schemes need the package that fsspec names. Its own rules hold
for them: which server is asked, how a user is known, and whether it is encrypted. So http and ftp are refused here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from manyheads.config.checks import did_you_mean
from manyheads.data.lines import phase_progress
from manyheads.errors import ConfigError, DataError, ManyHeadsError
from manyheads.extras.sources import fetching
from manyheads.files.commit import check_free_space, make_folder, saving
from manyheads.files.output_safety import locked

ADDRESS = "://"
_PATTERN = set("*?[")
_INSTEAD = {
    "http": "only https is read, as url:https://...",
    "https": "give it as url:https://...",
    "hf": "give it as hf:owner/name[config]",
    "ftp": "it is not encrypted; only https is read, as url:https://...",
}


def is_address(text: str) -> bool:
    """Tell whether a SOURCE is an address of fsspec by its form."""
    return re.match(r"[A-Za-z][\w+.-]*(::|://)", text) is not None


def check_storage(text: str, option: str) -> None:
    """Raises: ConfigError: an address of fsspec is not read, or its scheme is unknown."""
    from fsspec import available_protocols

    scheme = text.partition(ADDRESS)[0]
    if "::" in text:
        raise ConfigError(f"{option} {text}: addresses inside addresses (::) are not read; unpack the files first.")
    if scheme in _INSTEAD:
        raise ConfigError(f"{option} {text} is not read in this form: {_INSTEAD[scheme]}.")
    if scheme not in available_protocols():
        raise ConfigError(
            f"{option} {text}: fsspec knows no scheme {scheme!r}.{did_you_mean(scheme, available_protocols())}"
        )


@dataclass(frozen=True)
class Shards:
    """Files at an address, in order. files: the file system. is_here: they are files of this disk."""

    files: Any
    scheme: str
    names: Sequence[str]
    is_here: bool


def listed_at(text: str, option: str, most: int) -> Shards:
    """Return the files at an address: one, those of a pattern such as s3://bucket/part-*.jsonl.zst, or of a folder.

    Raises: ConfigError: a package is missing. DataError: nothing is there, or it cannot be listed.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    try:
        files, path = fsspec.url_to_fs(text)
        if _PATTERN & set(path):
            names = [name for name in files.glob(path) if files.isfile(name)]
        else:
            names = files.find(path) if files.isdir(path) else [path] if files.exists(path) else []
    except ImportError as error:
        raise ConfigError(f"{option} {text}: {_first_line(error)}.") from None
    except Exception as error:  # of many kinds: each package has its own
        raise DataError(
            f"{text} cannot be listed: {_first_line(error)}. Check the address, the network, and who may read it."
        ) from error
    names = sorted(name for name in names if not PurePosixPath(name).name.startswith("."))
    if not names:
        raise DataError(f"{option} {text}: there is no file.")
    if len(names) > most:
        raise DataError(f"{text} has more than {most:,} files; name a folder inside it, or a pattern.")
    return Shards(files, text.partition(ADDRESS)[0], names, isinstance(files, LocalFileSystem))


def fetch_shard(shards: Shards, name: str, fetcher: fetching.Fetcher) -> tuple[Path, fetching.Record]:
    """Return a file on this disk: itself, or in the cache, fetched if it is not there, and what it is.

    Raises: DataError: it has vanished, cannot be fetched, or is too large. SaveError: there is too little space.
    """
    if shards.is_here:
        if not Path(name).is_file():
            raise DataError(f"{name} has vanished since the folder was listed.")
        return Path(name), fetching.Record(Path(name).stat().st_size, {})
    url = f"{shards.scheme}://{name}"
    shown = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(name).name)[-100:]
    path = fetching.cache_folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / shown
    make_folder(path.parent)
    busy = f"{url} is being fetched by the process {{}}; wait for it, and run the command again."
    with locked(path.with_name(f"{shown}.lock"), lambda owner: DataError(busy.format(owner))):
        try:
            size = int(shards.files.info(name).get("size") or 0)
            if size > fetcher.most_bytes:
                raise DataError(
                    f"{url} has {size:,} bytes, and at most {fetcher.most_bytes:,} bytes are fetched; --most-bytes"
                    " raises the limit."
                )
            if fetcher.lock.update or not path.is_file() or path.stat().st_size != size:
                _copy(shards, name, path, size, fetcher)
        except ManyHeadsError:
            raise
        except FileNotFoundError:
            raise DataError(
                f"{url} has vanished since the folder was listed; the others that were fetched stay."
            ) from None
        except Exception as error:  # of many kinds: each package has its own
            raise DataError(
                f"{url} cannot be fetched: {_first_line(error)}. What was fetched stays, and the same command"
                " continues."
            ) from error
        return path, fetching.digest_of(path, fetcher.progress, f"checking {shown}")


def _copy(shards: Shards, name: str, path: Path, size: int, fetcher: fetching.Fetcher) -> None:
    """Write a file into the cache; it has its name when it is complete."""
    part = path.with_name(f"{path.name}.part")
    check_free_space(path, size)
    on_progress, done = phase_progress(fetcher.progress, f"bytes of {path.name}", size), 0
    try:
        with shards.files.open(name, "rb") as source, saving(part, size), part.open("wb") as file:
            while block := source.read(fetching.BLOCK_BYTES):
                done += len(block)
                if done > fetcher.most_bytes:
                    raise DataError(
                        f"{name} has more than {fetcher.most_bytes:,} bytes; --most-bytes raises the limit."
                    )
                file.write(block)
                on_progress(done)
            os.fsync(file.fileno())
        if done != size:
            raise DataError(f"{shards.scheme}://{name} ended after {done:,} of {size:,} bytes; run the command again.")
        with saving(path, 0):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


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
