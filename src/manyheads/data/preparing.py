"""The steps that make a folder of prepared data from any source: read, learn the vocabulary, encode, record.

The folder: tokenizer.json; `train`, `valid` and `test`, each a store of ids; manifest.json with settings, counts and
SHA-256 sums; and further files of the source. It appears under its name only when it is whole.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

from manyheads.data.manifest import file_record, write_data, write_manifest
from manyheads.data.progress import Progress
from manyheads.errors import ConfigError

__all__ = [
    "CONTROL",
    "FORMAT",
    "FORMAT_VERSION",
    "LANGUAGE_TASK",
    "SPLITS",
    "Holdout",
    "Source",
    "canonical",
    "prepare",
]

FORMAT = "manyheads.prepared"
FORMAT_VERSION = 2
SPLITS = ("train", "valid", "test")
LANGUAGE_TASK = "language-modelling"  # the task of a folder that `preparing_text` or `preparing_ids` made
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f]")  # all but tab and line feed: text seldom means them


class Vocabulary(Protocol):
    """A tokenizer or vocabulary."""

    @property
    def digest(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def save(self, path: Path, /) -> None: ...


class Source(Protocol):
    """The material of a folder: pairs, a text, or ids. `prepare` calls the methods in this order."""

    @property
    def settings(self) -> Any:
        """The settings of the vocabulary to be made, a dataclass; None: there is one already."""
        ...

    def read(self, folder: Path, progress: Progress) -> dict[str, str]:
        """Copy the splits into the folder, because a pipe can be read only once.

        Returns: split -> its origin, for people.
        Raises: DataError: a split is empty or cannot be used.
        """
        ...

    def learn(self, progress: Progress) -> Vocabulary:
        """Make the vocabulary, of the training split."""
        ...

    def encode(self, split: str, progress: Progress) -> dict[str, int]:
        """Write the ids of a split into its store. Returns: the counts of the split."""
        ...

    def finish(self) -> Iterable[str]:
        """Remove the copies that are no longer needed. Returns: the names of those that stay."""
        ...

    def record(self) -> dict[str, Any]:
        """Return further entries of the manifest, with the `task`."""
        ...


def prepare(
    folder: str | Path, source: Source, *, replace: bool = False, progress: Progress | None = None, key: str = ""
) -> dict[str, Any]:
    """Make a folder of prepared data.

    Args:
        folder: its name.
        source: its material.
        replace: replace an older folder of that name, once this one is whole.
        progress: called with the phase, what is done, and the total or 0.
        key: stored in the manifest, to recognise the folder.

    Returns: the manifest.
    Raises: DataError: the source cannot be used, or the folder exists. SaveError: the disk is full or refuses; nothing
        is left behind.
    """
    tell = progress or (lambda phase, done, total: None)
    manifest: dict[str, Any] = {}

    def write(aside: Path) -> None:
        origin = source.read(aside, tell)
        vocabulary = source.learn(tell)
        vocabulary.save(aside / "tokenizer.json")
        counts = {split: source.encode(split, tell) for split in origin}
        names = ["tokenizer.json", *(f"{split}/manifest.json" for split in origin), *source.finish()]
        settings = None if source.settings is None else dataclasses.asdict(source.settings)
        manifest.update(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "key": key,
                "origin": origin,
                "tokenizer": {"digest": vocabulary.digest, "vocab_size": vocabulary.vocab_size, "settings": settings},
                "counts": counts,
                "files": {name: file_record(aside / name) for name in names},
                **source.record(),
            }
        )
        write_manifest(aside, manifest)

    write_data(Path(folder), write, replace=replace)
    return manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holdout:
    """The part of the training files that is held out for validation and test: their end, the test part last.

    Bytes are cut anywhere; where lines matter (pieces, words, lines as documents) the cut is moved on to the next line,
    and where documents have one length, only whole ones are held out.

    Args:
        valid: bytes; 0: none.
        test: bytes; 0: none.
        whole: bytes that the training text must have in all, as a check that it is what its name says; 0: any number.

    Raises: ConfigError: a number is negative.
    """

    valid: int = 0
    test: int = 0
    whole: int = 0

    def __post_init__(self) -> None:
        for name in ("valid", "test"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{getattr(self, name)} bytes of {name} text are asked for; give at least 0.")

    def check_splits(self, given: Collection[str]) -> None:
        """Raises: ConfigError: a split is given and held out as well."""
        for name in ("valid", "test"):
            if name in given and getattr(self, name):
                raise ConfigError(
                    f"{getattr(self, name)} bytes for {name} are to be held back, but there are files for it already."
                )


def canonical(content: Any) -> bytes:
    """JSON bytes that are equal for equal content."""
    return json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()
