"""The common part of preparing texts and binary ids: copies, parts held back, stores of tokens; see `preparing`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from manyheads.data.preparing import LANGUAGE_TASK, SPLITS, Holdout, Source
from manyheads.data.store import CHECK_TOKENS, IntArray
from manyheads.data.token_store import TokenStore, write_tokens
from manyheads.errors import DataError
from manyheads.text.vocabulary import Vocabulary

BLOCK_BYTES = 2**20

Piece = tuple[Sequence[int] | IntArray, bool]
"""Some ids, and whether a document ends with them."""


@dataclass(frozen=True)
class Part:
    """A part of the copy of a split's files.

    Attributes:
        path: the copy.
        start: the first byte.
        stop: the byte after the last.
        files: for each file in the whole copy, the byte after its last, and its name.
    """

    path: Path
    start: int
    stop: int
    files: list[tuple[int, str]]

    def __len__(self) -> int:
        return self.stop - self.start

    def ends(self) -> list[int]:
        """Return the bytes after which a file ends, in order; the part's own end counts as the end of a file."""
        return sorted({*(end for end, _ in self.files if self.start < end < self.stop), self.stop})

    def blocks(self) -> Iterator[tuple[bytes, bool]]:
        """Yield blocks of bytes, and whether a file ends with each."""
        return self._read(lambda file, most: file.read(min(BLOCK_BYTES, most)))

    def lines(self) -> Iterator[tuple[bytes, bool]]:
        """Yield lines with their "\\n" (the last line of a file may have none), and whether a file ends with each."""
        return self._read(lambda file, most: file.readline(most))

    def _read(self, read: Callable[[BinaryIO, int], bytes]) -> Iterator[tuple[bytes, bool]]:
        with self.path.open("rb") as file:
            place = file.seek(self.start)
            for end in self.ends():
                while place < end:
                    content = read(file, end - place)
                    if not content:
                        raise DataError(f"{self.path} became shorter while it was read. Does another program use it?")
                    place += len(content)
                    yield content, place == end


class TokenSource(Source):
    """Files whose content becomes stores of tokens.

    Args:
        splits: the input of each split.
        holdout: the part of the training input that becomes validation and test data.

    Attributes:
        what: name of the data in messages.
        unit: name of the unit that counts positions in the files, and `unit_bytes`, its size.
        counted: names of the counts of a split, besides `tokens` and `documents`.
        vocabulary: set by `learn` at the latest.

    Raises: ConfigError: a split is given and held back as well.
    """

    what = "text"
    unit = "bytes"
    unit_bytes = 1
    counted: tuple[str, ...] = (
        *("bytes", "characters", "words", "lines", "unknown"),
        *("empty_dropped", "control_characters", "long_lines"),
    )
    vocabulary: Vocabulary

    def __init__(self, splits: Mapping[str, Any], holdout: Holdout | None) -> None:
        self.holdout = holdout or Holdout()
        self.holdout.check_splits(splits)
        self.splits = splits

    @abstractmethod
    def blocks(self, split: str) -> Iterator[tuple[str, bytes, bool]]:
        """Read a split. Yields: the name of a file, some of its bytes, and whether it ends with them."""

    @abstractmethod
    def pieces(self, part: Part, counts: dict[str, int]) -> Iterator[Piece]:
        """Encode a part and add to the counts, `bytes` at least."""

    def held(self) -> tuple[int, int]:
        """Return how many bytes are held back for validation and for test."""
        return self.holdout.valid, self.holdout.test

    def cut(self, path: Path, place: int, stop: int) -> int:
        """Return the first byte from `place` on at which a copy can be cut. stop: its size."""
        return place

    def read(self) -> dict[str, str]:
        self.copies = {split: self._copy(split) for split in self.splits}
        origin = {split: given.describe() for split, given in self.splits.items()}
        self._hold_out(origin)
        for split, part in self.copies.items():
            if not len(part):
                raise DataError(
                    f"There is no {split} {self.what} in {origin[split]}; give other files, or more of them, or leave"
                    f" the {split} split out."
                )
        return origin

    def encode(self, split: str) -> dict[str, int]:
        part, vocabulary = self.copies[split], self.vocabulary
        counts = dict.fromkeys(self.counted, 0)

        def watched() -> Iterator[Piece]:
            told = 0
            for piece in self.pieces(part, counts):
                yield piece
                if counts["bytes"] >= told + BLOCK_BYTES:
                    told = counts["bytes"]
                    self.progress(f"encode {split}", told, len(part))

        num_tokens = write_tokens(self.folder / split, watched(), vocabulary.vocab_size)
        if not num_tokens:
            raise DataError(f"The {split} text has no tokens: every line is empty. Give another, or leave it out.")
        self.progress(f"encode {split}", len(part), len(part))
        store = TokenStore.open(self.folder / split, verify=False)
        if vocabulary.unk_id is not None:
            blocks = (store.ids[start : start + CHECK_TOKENS] for start in range(0, num_tokens, CHECK_TOKENS))
            counts["unknown"] = sum(int((block == vocabulary.unk_id).sum()) for block in blocks)
        documents = 0 if vocabulary.documents == "none" else store.num_documents
        return {"tokens": num_tokens, "documents": documents, **counts}

    def finish(self) -> tuple[str, ...]:
        for split in self.splits:
            self.copies[split].path.unlink()
        return ()

    def record(self) -> dict[str, Any]:
        task = {"name": LANGUAGE_TASK, "level": self.vocabulary.kind, "documents": self.vocabulary.documents}
        return {"task": task, "published_tokens": {}}

    def _copy(self, split: str) -> Part:
        """Copy a split into the folder: a pipe can be read only once, and a file may change."""
        path = self.folder / f"{split}.copy"
        size = 0
        files = []
        with path.open("wb") as file:
            for name, block, ends in self.blocks(split):
                size += file.write(block)
                if ends:
                    files.append((size, name))
                self.progress(f"read {split}", size, 0)
        self.progress(f"read {split}", size, size)
        return Part(path, 0, size, files)

    def _hold_out(self, origin: dict[str, str]) -> None:
        """Divide the training copy."""
        holdout, train, where = self.holdout, self.copies["train"], origin["train"]
        size = len(train)
        if holdout.whole and size != holdout.whole:
            raise DataError(
                f"{where} has {size:,} bytes, but the corpus of that name has {holdout.whole:,}. Give the whole file,"
                " or leave out --layout and set the number of bytes to hold back: --valid-bytes, --test-bytes."
            )
        if not holdout.valid and not holdout.test:
            return
        valid, test = self.held()
        if size <= valid + test:
            raise DataError(
                f"{where} has {size:,} bytes; with {holdout.valid:,} held back for validation and {holdout.test:,} for"
                " test, none is left to train on. Hold back fewer."
            )
        bounds = [0, *(self.cut(train.path, place, size) for place in (size - valid - test, size - test)), size]
        for split, start, stop in zip(SPLITS, bounds[:-1], bounds[1:], strict=True):
            if split == "train" or getattr(holdout, split):
                self.copies[split] = Part(train.path, start, stop, train.files)
                first, last = start // self.unit_bytes, stop // self.unit_bytes
                origin[split] = f"{self.unit} {first:,} to {last:,} of {where}"
