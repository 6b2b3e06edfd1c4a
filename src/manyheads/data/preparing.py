"""The steps that make a folder of prepared data from any source: read, learn the vocabulary, encode, record.

The folder contains tokenizer.json; `train`, `valid` and `test`, each a store of ids; manifest.json with settings,
counts and SHA-256 sums; and further files of the source. It appears under its name only when it is complete.
"""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from manyheads.data.manifest import file_record, write_data
from manyheads.data.parts import Parts
from manyheads.data.progress import Progress
from manyheads.errors import ConfigError
from manyheads.text.tokenizer_file import TokenizerFile

FORMAT = "manyheads.prepared"
FORMAT_VERSION = 2
SPLITS = ("train", "valid", "test")
LANGUAGE_TASK = "language-modelling"  # the task of a folder made by `preparing_text` or `preparing_ids`
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f]")  # control characters except tab and line feed; rarely intended in text

T = TypeVar("T")


class Source(ABC):
    """The material of a folder: pairs, a text, or ids. `prepare` calls the methods in this order.

    Attributes:
        settings: the settings of the vocabulary to learn, a dataclass; None: the vocabulary is given.
        folder: the folder to write to; set by `prepare`.
        progress: set by `prepare`.
        parts: set by `prepare`; what took long to make, and is found again after a kill.
    """

    settings: Any
    folder: Path
    progress: Progress
    parts: Parts

    @abstractmethod
    def read(self) -> dict[str, str]:
        """Copy the splits into the folder, because a pipe can be read only once.

        Returns: split -> description of its origin.
        Raises: DataError: a split is empty or cannot be used.
        """

    @abstractmethod
    def learn(self) -> TokenizerFile:
        """Return the vocabulary: the given one, or one learned from the training split."""

    @abstractmethod
    def encode(self, split: str) -> dict[str, int]:
        """Write the ids of a split into its store. Returns: the counts of the split."""

    @abstractmethod
    def finish(self) -> Iterable[str]:
        """Remove the copies that are no longer needed. Returns: the names of those that stay."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return further entries of the manifest, with the `task`."""


def prepare(
    folder: str | Path, source: Source, *, replace: bool = False, progress: Progress | None = None, key: str = ""
) -> dict[str, Any]:
    """Make a folder of prepared data.

    Args:
        folder: its name.
        source: its material.
        replace: replace an older folder of that name when this one is complete.
        progress: called with the phase, the amount done, and the total or 0.
        key: stored in the manifest, to recognise the folder.

    Returns: the manifest.
    Raises:
        DataError: the source cannot be used, or the folder exists.
        SaveError: the disk is full or refuses; nothing is left behind.
    """

    def write(aside: Path) -> dict[str, Any]:
        source.folder = aside
        origin = source.read()
        vocabulary = source.learn()
        vocabulary.save(aside / "tokenizer.json")
        counts = {split: source.encode(split) for split in origin}
        names = ["tokenizer.json", *(f"{split}/manifest.json" for split in origin), *source.finish()]
        settings = None if source.settings is None else dataclasses.asdict(source.settings)
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "key": key,
            "origin": origin,
            "tokenizer": {"digest": vocabulary.digest, "vocab_size": vocabulary.vocab_size, "settings": settings},
            "counts": counts,
            "files": {name: file_record(aside / name) for name in names},
            **source.record(),
        }

    source.progress = progress or (lambda phase, done, total: None)
    with Parts(Path(folder), source.progress) as source.parts:
        return write_data(Path(folder), write, replace=replace)


def given_splits(train: T, valid: T | None, test: T | None) -> dict[str, T]:
    """Return split -> its input, without the splits that are None."""
    return {split: given for split, given in zip(SPLITS, (train, valid, test), strict=True) if given is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holdout:
    """The part of the training files that is held back for validation and test: their end, the test part last.

    Bytes are cut anywhere. Where lines matter (pieces, words, lines as documents) the cut moves to the next line, and
    where all documents have the same length, only whole documents are held back.

    Args:
        valid: number of bytes; 0: none.
        test: number of bytes; 0: none.
        whole: required size of the training text in bytes, as a check that it is the corpus of that name; 0: any size.

    Raises: ConfigError: a number is negative.
    """

    valid: int = 0
    test: int = 0
    whole: int = 0

    def __post_init__(self) -> None:
        for name in ("valid", "test"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{getattr(self, name)} bytes of {name} text are to be held back; give at least 0.")

    def check_splits(self, given: Collection[str]) -> None:
        """Raises: ConfigError: a split is given and held back as well."""
        for name in ("valid", "test"):
            if name in given and getattr(self, name):
                raise ConfigError(
                    f"{getattr(self, name)} bytes are to be held back for {name}, but there are files for it already."
                )


def canonical(content: Any) -> bytes:
    """Return JSON bytes that are equal for equal content."""
    return json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()
