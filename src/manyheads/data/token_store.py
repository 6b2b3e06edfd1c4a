"""Token ids of one long text on disk, mapped into memory: any part of it is read without reading what is before.

A folder holds `tokens.ids.bin` (all ids in a row, uint8, uint16 or uint32, little-endian) and `tokens.offsets.bin`
(int64, where each document begins, one more at the end), and manifest.json with the SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyheads.data.manifest import (
    file_record,
    read_manifest,
    refuse_strangers,
    verify_file,
    write_data,
    write_manifest,
)
from manyheads.data.store import DTYPES, IntArray, SideWriter, TokenSide, check_side, content_digest, map_side
from manyheads.errors import DataError

__all__ = ["TokenStore", "write_tokens"]

FORMAT = "manyheads.tokens"
FORMAT_VERSION = 2  # the first one: manifests vouch for themselves from 2 on
SIDE = "tokens"
FILES = (f"{SIDE}.ids.bin", f"{SIDE}.offsets.bin")


@dataclass(frozen=True)
class TokenStore:
    """A text as ids. A text without documents is one document; the end of a document is a token like others.

    Attributes:
        documents: document i is `documents[i]`; all ids are `documents.ids`.
        vocab_size: every id is below it.
        digest: SHA-256 over ids and offsets; equal exactly where they are.
    """

    documents: TokenSide
    vocab_size: int
    digest: str

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> TokenStore:
        """Map a folder written by `write_tokens`.

        Args:
            folder: where it is.
            verify: compare SHA-256 sums and look at every id; off, only sizes are compared.

        Raises: DataError: the folder is missing, damaged, or of a newer format.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, kind=FORMAT, version=FORMAT_VERSION)
        dtype = DTYPES.get(str(manifest.get("dtype")))
        count, vocab_size = manifest.get("num_documents"), manifest.get("vocab_size")
        if dtype is None or type(count) is not int or type(vocab_size) is not int or count < 0:
            raise DataError(f"{folder}/manifest.json is damaged: dtype, num_documents or vocab_size make no sense.")
        for name in FILES:
            verify_file(folder / name, manifest["files"].get(name), content=verify)
        try:
            side = map_side(folder, SIDE, dtype, count)
        except OSError as error:
            raise DataError(f"Cannot read {folder}: {error.strerror or error}.") from None
        if verify:
            refuse_strangers(folder, FILES)
            check_side(side, vocab_size, folder)
        return cls(side, vocab_size, content_digest(manifest, "num_documents"))

    @classmethod
    def from_lists(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> TokenStore:
        """A store in memory alone, for small texts and tests.

        Raises: DataError: an id is outside the vocabulary.
        """
        known = [np.asarray(document, np.int64) for document in documents]
        offsets = np.cumsum([0, *map(len, known)], dtype=np.int64)
        side = TokenSide(np.concatenate([*known, np.empty(0, np.int64)]), offsets)
        check_side(side, vocab_size, Path("The text given"))
        return cls(side, vocab_size, hashlib.sha256(side.ids.tobytes() + offsets.tobytes()).hexdigest())

    def first(self, count: int) -> TokenStore:
        """The text's first tokens, without a copy; its last document may be a part of one."""
        if count >= len(self):
            return self
        last = int(np.searchsorted(self.offsets, count, side="left"))
        offsets = np.append(self.offsets[:last], np.int64(count))
        digest = hashlib.sha256(f"{self.digest} {count}".encode()).hexdigest()
        return TokenStore(TokenSide(self.ids[:count], offsets), self.vocab_size, digest)

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def ids(self) -> IntArray:
        """All tokens in the order of the text. (tokens,)"""
        return self.documents.ids

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each document begins, and the end of the last. (documents + 1,)"""
        return self.documents.offsets

    @property
    def num_documents(self) -> int:
        return len(self.documents)


def write_tokens(folder: str | Path, parts: Iterable[tuple[Sequence[int] | IntArray, bool]], vocab_size: int) -> int:
    """Write a store; it appears under its name only when it is whole.

    Args:
        folder: must not exist yet.
        parts: (ids, whether a document ends with them), consumed as a stream; the last document ends with the stream.
        vocab_size: every id must be below it.

    Returns: the number of tokens.
    Raises:
        DataError: an id is outside the vocabulary, or the folder exists.
        SaveError: the disk is full or refuses.
    """
    written = 0

    def write(aside: Path) -> None:
        nonlocal written
        written = _write_files(aside, parts, vocab_size)

    write_data(Path(folder), write)
    return written


def _write_files(folder: Path, parts: Iterable[tuple[Sequence[int] | IntArray, bool]], vocab_size: int) -> int:
    dtype_name = next(name for name, dtype in DTYPES.items() if vocab_size <= 2 ** (8 * dtype.itemsize))
    num_documents = 0
    begun = False
    with (folder / FILES[0]).open("wb") as ids_file, (folder / FILES[1]).open("wb") as offsets_file:
        writer = SideWriter(ids_file, offsets_file, DTYPES[dtype_name], vocab_size)
        for ids, ends in parts:
            if ends:
                writer.add(ids)
                num_documents += 1
            else:
                writer.add_part(ids)
            begun = not ends and (begun or len(ids) > 0)
        if begun:
            writer.add(())
            num_documents += 1
        writer.flush()
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "num_documents": num_documents,
        "vocab_size": vocab_size,
        "dtype": dtype_name,
        "files": {name: file_record(folder / name) for name in FILES},
    }
    write_manifest(folder, manifest)
    return writer.total
