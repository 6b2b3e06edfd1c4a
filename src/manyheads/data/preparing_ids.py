"""From binary files or pictures to a folder of data, of the same form as `preparing_text` makes of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.data.preparing import LANGUAGE_TASK, SPLITS, Holdout, prepare
from manyheads.data.progress import Progress
from manyheads.data.raw_files import IdSource
from manyheads.data.store import IntArray
from manyheads.data.token_store import write_tokens
from manyheads.errors import DataError
from manyheads.text.id_vocabulary import CHANNELS, IdVocabulary
from manyheads.text.settings import IdSettings

__all__ = ["prepare_ids"]

BLOCK_IDS = 2**20
_OF_TEXT = ("characters", "words", "lines", "unknown", "empty_dropped", "control_characters", "long_lines",
            "bad_utf8_replaced", "bad_utf8_skipped")  # fmt: skip


def prepare_ids(
    folder: str | Path,
    *,
    train: IdSource,
    valid: IdSource | None = None,
    test: IdSource | None = None,
    settings: IdSettings,
    holdout: Holdout | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
) -> dict[str, Any]:
    """Build a folder of data of ids that are no text; read it with `prepared_text.TextData.open`.

    Args:
        folder: to be made.
        train: training ids; each file is read once.
        valid: validation ids, if any.
        test: test ids, if any.
        settings: form, vocabulary size and documents.
        holdout: take validation and test ids from the end of the training files, so many bytes of it; where
            documents have one length, or are pictures, no more than that and only whole ones.
        replace: put an older folder of that name away once this one is whole.
        progress: called now and then with what is being done, how many bytes are, and the total or 0.
        key: kept in the manifest, for whoever wants to know the folder again.

    Returns: the manifest.
    Raises:
        DataError: a file cannot be read, ends within an id or a document, or holds an id beyond the vocabulary; a split
            has none; the folder exists.
        ConfigError: a split is given and held back as well.
        MissingExtraError: a package that reads pictures is missing.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    sources = {name: source for name, source in zip(SPLITS, (train, valid, test), strict=True) if source is not None}
    cut = holdout or Holdout()
    cut.check_splits(sources)
    return prepare(folder, _IdFiles(sources, settings, cut), replace=replace, progress=progress, key=key)


@dataclass
class _Part:
    """Ids of a copy, by place. ends: where files end, and their names, of the whole copy."""

    path: Path
    start: int
    stop: int
    ends: list[tuple[int, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.stop - self.start

    def file_at(self, place: int) -> str:
        return next((name for end, name in self.ends if place < end), "the data")


class _IdFiles:
    """See `preparing.Source`."""

    def __init__(self, sources: Mapping[str, IdSource], settings: IdSettings, cut: Holdout) -> None:
        self.settings = settings
        self._sources, self._settings, self._cut = sources, settings, cut
        self._dtype = np.dtype("u1" if settings.form == "bytes" else "<u2")
        self._document_len = CHANNELS * settings.image_size**2 if settings.image_size else settings.document_len

    def read(self, folder: Path, progress: Progress) -> dict[str, str]:
        """See `Source.read`."""
        self._folder, self._progress = folder, progress
        self._parts = {name: self._copy(name, source) for name, source in self._sources.items()}
        origin = {name: source.describe() for name, source in self._sources.items()}
        self._hold_back(self._parts, self._cut, origin)
        for name, part in self._parts.items():
            if not len(part):
                raise DataError(f"There are no ids for {name} in {origin[name]}; give others, more, or leave it out.")
        return origin

    def learn(self, progress: Progress) -> IdVocabulary:
        """See `Source.learn`."""
        self._found = self._vocabulary(self._parts)
        return self._found

    def encode(self, split: str, progress: Progress) -> dict[str, int]:
        """See `Source.encode`."""
        return self._encode(split, self._parts[split], self._found)

    def finish(self) -> tuple[str, ...]:
        """See `Source.finish`."""
        for name in self._sources:
            (self._folder / f"{name}.ids").unlink()
        return ()

    def record(self) -> dict[str, Any]:
        """See `Source.record`."""
        task = {"name": LANGUAGE_TASK, "level": self._found.kind, "documents": self._found.documents}
        return {"task": task, "published_tokens": {}}

    def _copy(self, name: str, source: IdSource) -> _Part:
        """Copy ids into the folder, so that a pipe is read once and pictures are unpacked once."""
        path = self._folder / f"{name}.ids"
        size, begin = 0, 0
        ends: list[tuple[int, str]] = []
        with path.open("wb") as file:
            for origin, block, file_ends in source.read():
                file.write(block)
                size += len(block)
                if file_ends:
                    self._check_whole(origin, (size - begin) // self._dtype.itemsize)
                    begin = size
                    ends.append((size // self._dtype.itemsize, origin))
                self._progress(f"read {name}", size, 0)
        self._progress(f"read {name}", size, size)
        return _Part(path, 0, size // self._dtype.itemsize, ends)

    def _check_whole(self, origin: str, count: int) -> None:
        if self._document_len and count % self._document_len:
            raise DataError(
                f"{origin} holds {count:,} ids, no whole number of documents of {self._document_len:,}"
                " (--document-len). Is it cut off?"
            )

    def _hold_back(self, parts: dict[str, _Part], cut: Holdout, origin: dict[str, str]) -> None:
        if not cut.valid and not cut.test:
            return
        train, unit = parts["train"], self._document_len or 1
        held = {name: getattr(cut, name) // self._dtype.itemsize // unit * unit for name in ("valid", "test")}
        short = next((name for name in held if getattr(cut, name) and not held[name]), None)
        if short is not None:
            raise DataError(
                f"{getattr(cut, short)} bytes are to be held back for {short}, less than one document of"
                f" {unit * self._dtype.itemsize:,} bytes; hold back more."
            )
        if len(train) <= sum(held.values()):
            raise DataError(
                f"{origin['train']} has {len(train) * self._dtype.itemsize:,} bytes; with {cut.valid:,} held back for"
                f" validation and {cut.test:,} for testing none is left to train on. Hold back fewer."
            )
        bounds = [0, len(train) - sum(held.values()), len(train) - held["test"], len(train)]
        where = origin["train"]
        for name, start, stop in zip(SPLITS, bounds[:-1], bounds[1:], strict=True):
            if name == "train" or held[name]:
                parts[name] = _Part(train.path, start, stop, train.ends)
                origin[name] = f"ids {start:,} to {stop:,} of {where}"

    def _ids(self, part: _Part) -> IntArray:
        return np.memmap(part.path, self._dtype, "r")[part.start : part.stop]

    def _vocabulary(self, parts: Mapping[str, _Part]) -> IdVocabulary:
        settings = self._settings
        num_ids = 256 if settings.image_size else settings.vocab_size
        for name, part in parts.items():
            ids = self._ids(part)
            for start in range(0, len(ids), BLOCK_IDS):
                block = ids[start : start + BLOCK_IDS]
                largest = int(block.max())
                if settings.vocab_size and largest >= settings.vocab_size:
                    place = part.start + start + int(np.argmax(block >= settings.vocab_size))
                    raise DataError(
                        f"{part.file_at(place)} ({name}) holds the id {ids[place - part.start]}, but the vocabulary has"
                        f" {settings.vocab_size:,} ids, 0 to {settings.vocab_size - 1:,}. Raise --vocab-size, or choose"
                        " another --format."
                    )
                num_ids = max(num_ids, largest + 1)
        documents = "fixed" if self._document_len else settings.documents
        sizes = {"document_len": self._document_len, "image_size": settings.image_size}
        return IdVocabulary(num_ids, settings.form, documents, **sizes)

    def _encode(self, name: str, part: _Part, vocabulary: IdVocabulary) -> dict[str, int]:
        """Write a part into its store. Returns: what was counted."""
        total = len(part) * self._dtype.itemsize

        def watched() -> Iterator[tuple[IntArray, bool]]:
            done = 0
            for ids, ends in self._documents(part, vocabulary):
                yield ids, ends
                before, done = done, done + len(ids)
                if done // BLOCK_IDS > before // BLOCK_IDS:
                    self._progress(f"encode {name}", min(done * self._dtype.itemsize, total), total)

        num_tokens = write_tokens(self._folder / name, watched(), vocabulary.vocab_size)
        self._progress(f"encode {name}", total, total)
        num_documents = 0
        if self._document_len:
            num_documents = len(part) // self._document_len
        elif vocabulary.end_id is not None:
            num_documents = num_tokens - len(part)
        return {"tokens": num_tokens, "bytes": total, "documents": num_documents, **dict.fromkeys(_OF_TEXT, 0)}

    def _documents(self, part: _Part, vocabulary: IdVocabulary) -> Iterator[tuple[IntArray, bool]]:
        """Ids in order, and whether a document ends with them."""
        ids = self._ids(part)
        if self._document_len:
            for start in range(0, len(ids), self._document_len):
                yield ids[start : start + self._document_len], True
            return
        ends = [end - part.start for end, _ in part.ends] if vocabulary.end_id is not None else []
        begin = 0
        for end in sorted({end for end in ends if 0 < end < len(ids)} | {len(ids)}):
            for start in range(begin, end, BLOCK_IDS):
                yield ids[start : min(start + BLOCK_IDS, end)], False
            if vocabulary.end_id is not None:
                yield np.array([vocabulary.end_id]), True
            begin = end
