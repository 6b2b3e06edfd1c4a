"""Opening a folder of prepared data: the parts that are the same for all tasks."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from manyheads.data.lines import stored_lines
from manyheads.data.preparing import (
    CLEANING,
    FORMAT,
    FORMAT_VERSION,
    LANGUAGE_TASK,
    SPLITS,
    canonical,
    read_manifest,
    refuse_strangers,
    text_path,
    verify_file,
)
from manyheads.errors import DataError, SaveError
from manyheads.files.verify import MANIFEST

EMBEDDED = "embedded:"
TATOEBA = "embedded:tatoeba-en-de"
NOTED = (
    "unknown",
    "empty_dropped",
    "empty_kept",
    "bad_utf8_replaced",
    "bad_utf8_skipped",
    "line_breaks_replaced",
    "columns_ignored",
    "control_characters",
    "long_lines",
    "source_unknown",
    "target_unknown",
)

Counts = dict[str, dict[str, int]]  # split -> name -> number


@dataclass
class _Tokenizer:
    digest: str = ""
    vocab_size: int = 0
    settings: dict[str, Any] | None = None


@dataclass
class _File:
    sha256: str
    size: int


@dataclass
class _Task:
    name: str


@dataclass
class _Manifest:
    """The types of the fields of a manifest; some are of one task, and older folders lack some."""

    files: dict[str, _File]
    key: str = ""
    origin: dict[str, str] = field(default_factory=dict)
    tokenizer: _Tokenizer = field(default_factory=_Tokenizer)
    counts: Counts = field(default_factory=dict)
    published_tokens: dict[str, int] = field(default_factory=dict)
    label_counts: Counts = field(default_factory=dict)
    task: _Task = field(default_factory=lambda: _Task("translation"))
    languages: list[tuple[str, str]] = field(default_factory=list)
    directions: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)


Folder = TypeVar("Folder", bound="PreparedFolder")


def prepared_task(path: str | Path) -> str:
    """Return the task of a folder of prepared data: `translation`, `parsing`, `language-modelling`,
    `classification` or `spans`.

    Raises: DataError: it is not a folder of prepared data.
    """
    name: str = read_prepared(Path(path)).get("task", {"name": "translation"})["name"]
    return name


def read_prepared(path: Path) -> dict[str, Any]:
    """Return the manifest of a folder of prepared data.

    Raises: DataError: see `read_manifest`; or a field has another type, a count is negative or missing.
    """
    from pydantic import ValidationError

    content = read_manifest(path, kind=FORMAT, version=FORMAT_VERSION)

    def refuse(name: str, found: str) -> DataError:
        return DataError(f"{path / MANIFEST} is damaged: {name} {found}. Prepare the data again.")

    try:
        manifest: _Manifest = _shape().validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise refuse(name, f"is {json.dumps(first['input'])[:60]} ({first['msg']})") from None
    for group, all_counts in (("counts", manifest.counts), ("label_counts", manifest.label_counts)):
        for split, counts in all_counts.items():
            for name, count in counts.items():
                if count < 0:
                    raise refuse(f"{group}.{split}.{name}", f"is {count}, below 0")
    for split in _splits(content) if manifest.task.name == LANGUAGE_TASK else ():
        for name in ("tokens", "bytes", "words", "documents"):
            if name not in manifest.counts.get(split, {}):
                raise refuse(f"counts.{split}.{name}", "is missing")
    return content


@cache
def _shape() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(_Manifest)


@dataclass(frozen=True, kw_only=True)
class PreparedFolder:
    """The common part of the prepared data of all tasks.

    Attributes:
        path: the folder.
        manifest: settings, counts and SHA-256 sums.
        tokenizer: or a vocabulary.
        train, valid, test: stores; None: the folder lacks that split.
    """

    path: Path
    manifest: dict[str, Any]
    tokenizer: Any
    train: Any
    valid: Any = None
    test: Any = None

    @property
    def digest(self) -> str:
        """SHA-256 over the tokenizer, ids and texts; the same for the same data in another folder."""
        files = {name: record for name, record in self.manifest["files"].items() if name != CLEANING}
        return hashlib.sha256(canonical(files)).hexdigest()

    def describe_splits(self, about: str, sizes: Callable[[str, Any], Sequence[str]], vocabulary: str = "") -> str:
        """Return lines for users: the data, its vocabulary, and of each split sizes and the unusual lines in it.

        Args: about: what follows the path. sizes: of a split, given its name and its store. vocabulary: a description;
            empty: that of the tokenizer.
        """
        if not vocabulary:
            case = ", lower case" if self.tokenizer.lowercase else ""
            vocabulary = f"tokenizer {self.tokenizer.kind}, {self.tokenizer.vocab_size} pieces{case}"
        lines = [f"data {self.digest[:12]} in {self.path}{about}", vocabulary]
        for split in SPLITS:
            store = getattr(self, split)
            if store is not None:
                counts = self.manifest.get("counts", {}).get(split, {})
                noted = [f"{counts[name]:,} {name.replace('_', ' ')}" for name in NOTED if counts.get(name)]
                lines.append(f"{split}: " + ", ".join([*sizes(split, store), *noted]))
        return "\n".join(lines)


def open_manifest(path: Path, command: str, verify: bool) -> dict[str, Any]:
    """Return the manifest of a folder of prepared data, after checking the tokenizer and the stores' manifests.

    Args:
        path: the folder.
        command: the command that makes such a folder.
        verify: compare SHA-256 sums, and refuse files that the manifest does not list.

    Raises: DataError: the folder is missing or damaged.
    """
    if not path.is_dir():
        raise DataError(f"There is no folder {path} with prepared data; make one with `{command}`.")
    manifest = read_prepared(path)
    known = manifest["files"]
    for name in ("tokenizer.json", *(f"{split}/manifest.json" for split in _splits(manifest))):
        verify_file(path / name, known.get(name), content=verify)
    if verify:
        refuse_strangers(path, known)
    return manifest


def _splits(manifest: dict[str, Any]) -> list[str]:
    return [split for split in SPLITS if split == "train" or f"{split}/manifest.json" in manifest["files"]]


def open_stores(
    store: type[Any], path: Path, manifest: dict[str, Any], verify: bool, vocab_size: int | None = None
) -> dict[str, Any]:
    """Return split -> its store, of this class. vocab_size: of the tokenizer, to be compared.

    Raises: DataError: a store is damaged, or belongs to a vocabulary of another size.
    """
    stores = {split: store.open(path / split, verify=verify) for split in _splits(manifest)}
    for split, opened in stores.items():
        if vocab_size is not None and opened.vocab_size != vocab_size:
            raise DataError(
                f"{path / split} was made for a vocabulary of {opened.vocab_size} ids, but the tokenizer of this folder"
                f" has {vocab_size}. Prepare the data again."
            )
    return stores


def read_texts(
    folder: Path, sides: tuple[str, str], manifest: dict[str, Any], stores: Mapping[str, Sized], verify: bool
) -> dict[str, list[tuple[str, str]]]:
    """Return the raw text of validation and test: split -> its rows, whose two sides are files of as many lines.

    Raises: DataError: a file is missing or damaged, or has another number of lines.
    """
    texts = {}
    for split in stores:
        if split == "train":
            continue
        paths, count = [text_path(folder, split, side) for side in sides], len(stores[split])
        for path in paths:
            verify_file(path, manifest["files"].get(path.name), content=verify)
        first, second = (list(stored_lines(path)) for path in paths)
        if not len(first) == len(second) == count:
            raise DataError(f"{paths[0]} and {paths[1]} do not hold {count} lines each. Prepare the data again.")
        texts[split] = list(zip(first, second, strict=True))
    return texts


def refuse_missing(path: str, names: Sequence[str], command: str) -> None:
    """Check that a path is a folder.

    Args:
        path: the value of `data.path`.
        names: its other possible values; the last one is recommended.
        command: the command that makes such a folder.

    Raises: DataError: the path does not exist, or is not a folder.
    """
    if not Path(path).exists():
        near = difflib.get_close_matches(path, names, 1, 0.7)
        hint = f"did you mean {near[0]}?" if near else f"prepare one with `{command}`, or use {names[-1]}."
        raise DataError(f"data.path is {path!r}, but there is no such folder; {hint}")
    if not Path(path).is_dir():
        raise DataError(
            f"data.path is {path!r}, which is not a folder; training reads a folder that `{command}` made from files."
        )


def cached_folder(
    recipe: dict[str, Any], cache_dir: Path, make: Callable[[Path, str], Any], open_folder: Callable[[Path], Folder]
) -> Folder:
    """Return the folder of a recipe; prepare it first unless a complete one exists.

    Args:
        recipe: everything that determines the content, with the name of an embedded corpus under `corpus`.
        cache_dir: the folder above.
        make: prepares a folder, replacing an older one; also given a key that identifies the recipe.
        open_folder: opens a folder, and raises DataError if it is damaged.
    """
    name = recipe["corpus"].removeprefix(EMBEDDED)
    key = hashlib.sha256(canonical({**recipe, "format_version": FORMAT_VERSION})).hexdigest()
    folder = cache_dir / f"{name}-{key[:12]}"

    def complete() -> Folder | None:
        try:
            data = open_folder(folder)
        except DataError:
            return None
        return data if data.manifest.get("key") == key else None

    found = complete()
    if found is None:
        try:
            make(folder, key)
        except SaveError:
            if complete() is None:  # another process can have written the same folder first
                raise
        found = open_folder(folder)
    return found
