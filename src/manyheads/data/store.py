"""Token ids of sentence pairs on disk, mapped into memory: any pair is read without reading the others.

A folder holds, for each side, `*.ids.bin` (all ids in a row, uint16 or uint32, little-endian) and `*.offsets.bin`
(int64, where each sentence begins, one more at the end), and manifest.json with the SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

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
from manyheads.errors import DataError

__all__ = [
    "DTYPES",
    "OFFSET_DTYPE",
    "PairStore",
    "SideWriter",
    "TokenSide",
    "check_side",
    "content_digest",
    "map_side",
    "write_pairs",
]

FORMAT = "manyheads.pairs"
FORMAT_VERSION = 2
SIDES = ("source", "target")
DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSET_DTYPE = np.dtype("<i8")
FLUSH_TOKENS = 2**20
CHECK_TOKENS = 2**24

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class TokenSide:
    """The sentences of one language: sentence i is `ids[offsets[i]:offsets[i + 1]]`, without special ids."""

    ids: IntArray
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> IntArray:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sentence."""
        return np.diff(self.offsets).astype(np.int32)


@dataclass(frozen=True)
class PairStore:
    """Aligned sentences as ids. `store[i]` is (source ids, target ids), neither with special ids."""

    source: TokenSide
    target: TokenSide
    vocab_size: int
    digest: str

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> PairStore:
        """Map a folder written by `write_pairs`.

        Args:
            folder: where it is.
            verify: compare SHA-256 sums and look at every id; off, only sizes are compared.

        Raises: DataError: the folder is missing, damaged, or of a newer format.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, kind=FORMAT, version=FORMAT_VERSION)
        dtype = DTYPES.get(str(manifest.get("dtype")))
        num_pairs, vocab_size = manifest.get("num_pairs"), manifest.get("vocab_size")
        if dtype is None or type(num_pairs) is not int or type(vocab_size) is not int or num_pairs < 0:
            raise DataError(f"{folder}/manifest.json is damaged: dtype, num_pairs or vocab_size make no sense.")
        for name in _file_names():
            verify_file(folder / name, manifest["files"].get(name), content=verify)
        try:
            sides = [map_side(folder, side, dtype, num_pairs) for side in SIDES]
        except OSError as error:
            raise DataError(f"Cannot read {folder}: {error.strerror or error}.") from None
        if verify:
            refuse_strangers(folder, tuple(_file_names()))
            for side in sides:
                check_side(side, vocab_size, folder)
        return cls(sides[0], sides[1], vocab_size, content_digest(manifest, "num_pairs"))

    @classmethod
    def from_lists(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> PairStore:
        """A store in memory alone, for small sets and tests."""
        known = [(np.asarray(source, np.int64), np.asarray(target, np.int64)) for source, target in pairs]
        sides = []
        for column in range(2):
            rows = [pair[column] for pair in known]
            offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
            sides.append(TokenSide(np.concatenate([*rows, np.empty(0, np.int64)]), offsets))
            check_side(sides[-1], vocab_size, Path("The pairs given"))
        content = hashlib.sha256(b"".join(side.ids.tobytes() + side.offsets.tobytes() for side in sides))
        return cls(sides[0], sides[1], vocab_size, content.hexdigest())

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[IntArray, IntArray]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        return self.source[index], self.target[index]

    @property
    def source_lengths(self) -> NDArray[np.int32]:
        """Tokens of each source, without special ids. (pairs,)"""
        return self.source.lengths

    @property
    def target_lengths(self) -> NDArray[np.int32]:
        """Tokens of each target, without special ids. (pairs,)"""
        return self.target.lengths


def write_pairs(folder: str | Path, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> int:
    """Write a store; it appears under its name only when it is whole.

    Args:
        folder: must not exist yet.
        pairs: (source ids, target ids), without special ids; consumed as a stream.
        vocab_size: every id must be below it.

    Returns: the number of pairs.
    Raises:
        DataError: an id is outside the vocabulary, or the folder exists.
        SaveError: the disk is full or refuses.
    """
    written = 0

    def write(aside: Path) -> None:
        nonlocal written
        written = _write_files(aside, pairs, vocab_size)

    write_data(Path(folder), write)
    return written


class SideWriter:
    """Collects one side's ids and writes them in blocks, so that memory stays small.

    Attributes: total: ids given so far.
    """

    def __init__(self, ids_file: IO[bytes], offsets_file: IO[bytes], dtype: np.dtype[Any], vocab_size: int) -> None:
        self._ids_file, self._offsets_file = ids_file, offsets_file
        self._dtype, self._vocab_size = dtype, vocab_size
        self._ids = array("q")
        self._offsets = array("q", [0])
        self.total = 0

    def add(self, ids: Sequence[int] | IntArray) -> None:
        """A whole sentence, or the last part of one."""
        self.add_part(ids)
        self._offsets.append(self.total)

    def add_part(self, ids: Sequence[int] | IntArray) -> None:
        """Append ids to the sentence that is being written."""
        if isinstance(ids, np.ndarray):
            self._ids.frombytes(ids.astype(np.int64).tobytes())
        else:
            self._ids.extend(ids)
        self.total += len(ids)
        if len(self._ids) >= FLUSH_TOKENS:
            self.flush()

    def flush(self) -> None:
        ids = np.frombuffer(self._ids, np.int64) if self._ids else np.empty(0, np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self._vocab_size):
            wrong = ids[(ids < 0) | (ids >= self._vocab_size)][0]
            raise DataError(f"Token id {wrong} is outside the vocabulary of {self._vocab_size}; is this its tokenizer?")
        self._ids_file.write(ids.astype(self._dtype).tobytes())
        self._offsets_file.write(np.frombuffer(self._offsets, np.int64).astype(OFFSET_DTYPE).tobytes())
        del ids
        self._ids, self._offsets = array("q"), array("q")


def _write_files(folder: Path, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> int:
    dtype_name = "uint16" if vocab_size <= 2**16 else "uint32"
    files = [(folder / name).open("wb") for name in _file_names()]
    num_pairs = 0
    try:
        source = SideWriter(files[0], files[1], DTYPES[dtype_name], vocab_size)
        target = SideWriter(files[2], files[3], DTYPES[dtype_name], vocab_size)
        for source_ids, target_ids in pairs:
            source.add(source_ids)
            target.add(target_ids)
            num_pairs += 1
        source.flush()
        target.flush()
    finally:
        for file in files:
            file.close()
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "num_pairs": num_pairs,
        "vocab_size": vocab_size,
        "dtype": dtype_name,
        "files": {name: file_record(folder / name) for name in _file_names()},
    }
    write_manifest(folder, manifest)
    return num_pairs


def _file_names() -> Iterator[str]:
    for side in SIDES:
        yield f"{side}.ids.bin"
        yield f"{side}.offsets.bin"


def content_digest(manifest: dict[str, Any], count: str) -> str:
    """SHA-256 over what a store's manifest says of its content. count: the entry that says how many there are."""
    known = {key: manifest[key] for key in ("dtype", "files", count, "vocab_size")}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def map_side(folder: Path, side: str, dtype: np.dtype[Any], num_pairs: int) -> TokenSide:
    """Map both files of a side and check that they fit each other.

    Raises: DataError: they do not. OSError: they cannot be read.
    """
    ids_path, offsets_path = folder / f"{side}.ids.bin", folder / f"{side}.offsets.bin"
    if offsets_path.stat().st_size != OFFSET_DTYPE.itemsize * (num_pairs + 1):
        raise DataError(f"{offsets_path} does not hold {num_pairs + 1} offsets. Prepare the data again.")
    offsets = np.array(np.memmap(offsets_path, OFFSET_DTYPE, "r")).astype(np.int64)
    size = ids_path.stat().st_size
    if offsets[0] != 0 or int(offsets[-1]) * dtype.itemsize != size or (np.diff(offsets) < 0).any():
        raise DataError(f"{offsets_path} does not fit {ids_path.name}. Prepare the data again.")
    # an empty file cannot be mapped; ndarray, not memmap, as numpy makes slices of the latter ten times slower
    ids = np.asarray(np.memmap(ids_path, dtype, "r")) if size else np.empty(0, dtype)
    return TokenSide(ids, offsets)


def check_side(side: TokenSide, vocab_size: int, folder: Path) -> None:
    """Look at every id. Raises: DataError: one is outside the vocabulary."""
    for start in range(0, len(side.ids), CHECK_TOKENS):
        block = side.ids[start : start + CHECK_TOKENS]
        if block.min() < 0 or block.max() >= vocab_size:
            raise DataError(f"{folder} holds token ids outside its vocabulary of {vocab_size}. Prepare the data again.")
