"""Opening prepared trees for a chart parser: tokenizer, labels, tags, stores, and the raw validation and test trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manyheads.data.prepared_folder import (
    PreparedFolder,
    open_manifest,
    open_stores,
    prepared_task,
    read_texts,
    refuse_missing,
)
from manyheads.errors import DataError
from manyheads.extras.parsing.preparing import SIDES, SPANS_TASK
from manyheads.extras.parsing.span_store import SpanStore
from manyheads.text.tokenizer import Tokenizer

__all__ = ["SpanData", "open_spans"]

_COMMAND = "manyheads prepare --task spans"


@dataclass(frozen=True, kw_only=True)
class SpanData(PreparedFolder):
    """A folder written by `prepare_spans`.

    Attributes:
        tokenizer: of words.
        constituents: the labels of spans; the id of the first is 1.
        tags: the tags of words; the id of the first is 1.
        root: the label at the top of every tree.
        train: training trees as numbers.
        valid: validation trees as numbers, or None.
        test: test trees as numbers, or None.
        texts: split -> its sentences and trees as lines of text, in order, of valid and test.
    """

    tokenizer: Tokenizer
    constituents: tuple[str, ...]
    tags: tuple[str, ...]
    root: str
    train: SpanStore
    valid: SpanStore | None = None
    test: SpanStore | None = None
    texts: Mapping[str, list[tuple[str, str]]]

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> SpanData:
        """Open a folder written by `manyheads prepare --task spans`.

        Args: verify: compare every SHA-256 sum; otherwise compare sizes only.

        Raises: DataError: the folder is missing or damaged, of another task, or its parts do not belong together.
        """
        path = Path(path)
        manifest = open_manifest(path, _COMMAND, verify)
        if (name := prepared_task(path)) != SPANS_TASK:
            raise DataError(f"{path} is prepared for {name}; trees for a chart parser are needed here: `{_COMMAND}`.")
        task = manifest["task"]
        names = [task.get(key) for key in ("constituents", "tags")]
        are_names = all(isinstance(some, list) and some and all(isinstance(one, str) for one in some) for some in names)
        if not are_names or not isinstance(task.get("root"), str):
            raise DataError(
                f"{path}/manifest.json is damaged: labels, tags or root are missing. Prepare the data again."
            )
        constituents, tags = map(tuple, names)
        tokenizer = Tokenizer.load(path / "tokenizer.json")
        stores = open_stores(SpanStore, path, manifest, verify)
        for split, store in stores.items():
            found = store.largest_label, store.tag.ids.max(initial=0), store.piece.ids.max(initial=0)
            largest = len(constituents), len(tags), tokenizer.vocab_size - 1
            if any(one > most for one, most in zip(found, largest, strict=True)):
                raise DataError(f"{path / split} does not fit the tokenizer, labels and tags. Prepare the data again.")
        named = {"constituents": constituents, "tags": tags, "root": task["root"]}
        texts = read_texts(path, SIDES, manifest, stores, verify)
        return cls(path=path, manifest=manifest, tokenizer=tokenizer, texts=texts, **named, **stores)

    def describe(self) -> str:
        """Return a few lines for users: sizes, what was left out, and the tokenizer."""
        return self.describe_splits(
            f", {len(self.constituents)} labels, {len(self.tags)} tags",
            lambda _, store: (f"{len(store):,} trees", f"{len(store.tag.ids):,} words"),
        )


def open_spans(path: str) -> SpanData:
    """Return the data of a run. Raises: DataError: the folder is missing, damaged, or of another task."""
    if not path:
        raise DataError(f"data.path is not set; prepare trees with `{_COMMAND}`, and name the folder.")
    refuse_missing(path, [path], _COMMAND)
    return SpanData.open(path)
