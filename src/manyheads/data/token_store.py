"""Token ids of one long text on disk, mapped into memory: any part of it is read without reading the text before it.

The format is that of `store`, with one side, `tokens`, whose sentences are the documents of the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyheads.data.store import IntArray, SideWriter, StoreFormat, TokenSide, sides_from_lists

_FORMAT = StoreFormat("manyheads.tokens", "num_documents", ("tokens",), ("uint8", "uint16", "uint32"))


@dataclass(frozen=True)
class TokenStore:
    """A text as ids. A text without documents is one document; the end of a document is an ordinary token.

    Attributes:
        documents: document i is `documents[i]`; all ids are `documents.ids`.
        vocab_size: every id is below it.
        digest: SHA-256 over ids and offsets.
        is_cut: the text was cut, so its last document may be incomplete.
    """

    documents: TokenSide
    vocab_size: int
    digest: str
    is_cut: bool = False

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> TokenStore:
        """Map a folder written by `write_tokens`.

        Args:
            folder: the folder.
            verify: compare SHA-256 sums and check every id; otherwise compare sizes only.

        Raises: DataError: the folder is missing, damaged, or of a newer format.
        """
        [side], vocab_size, digest = _FORMAT.open(Path(folder), verify)
        return cls(side, vocab_size, digest)

    @classmethod
    def from_lists(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> TokenStore:
        """Return a store in memory, for small texts and tests.

        Raises: DataError: an id is outside the vocabulary.
        """
        [side], digest = sides_from_lists([documents], vocab_size)
        return cls(side, vocab_size, digest)

    def first(self, count: int) -> TokenStore:
        """Return the first `count` tokens of the text, without a copy; the last document may be incomplete."""
        if count >= len(self):
            return self
        last = int(np.searchsorted(self.offsets, count, side="left"))
        offsets = np.append(self.offsets[:last], np.int64(count))
        digest = hashlib.sha256(f"{self.digest} {count}".encode()).hexdigest()
        return TokenStore(TokenSide(self.ids[:count], offsets), self.vocab_size, digest, is_cut=True)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def ids(self) -> IntArray:
        """All tokens in the order of the text. (tokens,)"""
        return self.documents.ids

    @property
    def offsets(self) -> NDArray[np.int64]:
        """The position where each document begins, and the end of the last one. (documents + 1,)"""
        return self.documents.offsets

    @property
    def num_documents(self) -> int:
        return len(self.documents)


def write_tokens(folder: str | Path, parts: Iterable[tuple[Sequence[int] | IntArray, bool]], vocab_size: int) -> int:
    """Write a store; it appears under its name only when it is complete.

    Args:
        folder: must not exist yet.
        parts: (ids, whether a document ends with them), consumed as a stream; the last document ends with it.
        vocab_size: every id must be below it.

    Returns: the number of tokens.
    Raises:
        DataError: an id is outside the vocabulary, or the folder exists.
        SaveError: the disk is full or refuses.
    """

    def fill(writer: SideWriter) -> None:
        for ids, ends in parts:
            writer.add(ids, ends=ends)
        if writer.unfinished:
            writer.add(())

    return _FORMAT.write(Path(folder), vocab_size, fill)[0].num_tokens
