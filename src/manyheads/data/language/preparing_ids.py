"""From binary files or images to a folder of data in the form that `preparing_text` makes from texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.data.language.preparing_tokens import Part, Piece, TokenSource
from manyheads.data.language.raw_files import IdSource
from manyheads.data.preparing import Holdout, given_splits, prepare
from manyheads.data.progress import Progress
from manyheads.data.store import IntArray
from manyheads.errors import DataError
from manyheads.text.settings import ITEM_BYTES, IdSettings
from manyheads.text.vocabulary import CHANNELS, IdVocabulary

BLOCK_IDS = 2**20


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
    """Make a folder of data from ids that do not stand for text; read it with `prepared_text.TextData.open`.

    Args:
        folder: the folder to make.
        train: the training ids; each file is read once.
        valid: the validation ids, if any.
        test: the test ids, if any.
        settings: form, vocabulary size and documents.
        holdout: take validation and test ids from the end of the training files, this number of bytes; where all
            documents have the same length, as images do, at most that number, and only whole documents.
        replace: replace an older folder of that name when this one is complete.
        progress: called with the phase, the number of bytes done, and the total or 0.
        key: stored in the manifest, to recognise the folder.

    Returns: the manifest.
    Raises:
        DataError: a file cannot be read, ends within an id or a document, or contains an id outside the vocabulary; a
            split is empty; the folder exists.
        ConfigError: a split is given and held back as well.
        MissingExtraError: a package that reads images is missing.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    source = _IdFiles(given_splits(train, valid, test), settings, holdout)
    return prepare(folder, source, replace=replace, progress=progress, key=key)


class _IdFiles(TokenSource):
    """See `preparing.Source`."""

    what = "data"
    unit = "ids"
    counted = (*TokenSource.counted, "bad_utf8_replaced", "bad_utf8_skipped")

    def __init__(self, splits: Mapping[str, IdSource], settings: IdSettings, holdout: Holdout | None) -> None:
        super().__init__(splits, holdout)
        self.settings: IdSettings = settings
        self.unit_bytes = ITEM_BYTES[settings.form]
        self._dtype = np.dtype(f"<u{self.unit_bytes}")
        self._document_len = CHANNELS * settings.image_size**2 if settings.image_size else settings.document_len

    def blocks(self, split: str) -> Iterator[tuple[str, bytes, bool]]:
        """See `TokenSource.blocks`. Raises: DataError: a file ends within a document."""
        size = 0
        for name, block, ends in self.splits[split].read():
            size += len(block)
            if ends and self._document_len and size % (self._document_len * self.unit_bytes):
                raise DataError(
                    f"{name} holds {size // self.unit_bytes:,} ids, which is not a multiple of the document length"
                    f" {self._document_len:,} (--document-len). Is the file incomplete?"
                )
            size = 0 if ends else size
            yield name, block, ends

    def held(self) -> tuple[int, int]:
        """Round down to whole documents; see `TokenSource.held`."""
        whole = self.unit_bytes * (self._document_len or 1)
        for split in ("valid", "test"):
            if 0 < getattr(self.holdout, split) < whole:
                raise DataError(
                    f"{getattr(self.holdout, split)} bytes are to be held back for {split}, less than one document of"
                    f" {whole:,} bytes; hold back more."
                )
        return self.holdout.valid // whole * whole, self.holdout.test // whole * whole

    def learn(self) -> IdVocabulary:
        """Look at all ids for the size of the vocabulary; see `Source.learn`."""
        settings = self.settings
        num_ids = 256 if settings.image_size else settings.vocab_size
        for split, part in self.copies.items():
            ids = self._ids(part)
            for start in range(0, len(ids), BLOCK_IDS):
                block = ids[start : start + BLOCK_IDS]
                largest = int(block.max())
                if settings.vocab_size and largest >= settings.vocab_size:
                    place = start + int(np.argmax(block >= settings.vocab_size))
                    byte = part.start + place * self.unit_bytes
                    name = next(name for end, name in part.files if byte < end)
                    raise DataError(
                        f"{name} ({split}) holds the id {ids[place]}, but the vocabulary has {settings.vocab_size:,}"
                        f" ids, 0 to {settings.vocab_size - 1:,}. Raise --vocab-size, or choose another --format."
                    )
                num_ids = max(num_ids, largest + 1)
        documents = "fixed" if self._document_len else settings.documents
        sizes = {"document_len": self._document_len, "image_size": settings.image_size}
        self.vocabulary = IdVocabulary(num_ids, settings.form, documents, **sizes)
        return self.vocabulary

    def pieces(self, part: Part, counts: dict[str, int]) -> Iterator[Piece]:
        ids = self._ids(part)
        begin = 0
        for end in ((end - part.start) // self.unit_bytes for end in part.ends()):
            step = self._document_len or BLOCK_IDS
            for start in range(begin, end, step):
                block = ids[start : min(start + step, end)]
                counts["bytes"] += block.nbytes
                yield block, self._document_len > 0
            if self.vocabulary.end_id is not None:
                yield [self.vocabulary.end_id], True
            begin = end

    def _ids(self, part: Part) -> IntArray:
        return np.memmap(part.path, self._dtype, "r")[part.start // self.unit_bytes : part.stop // self.unit_bytes]
