"""Token ids on disk, mapped into memory: any sentence or part of a text is read without reading what is before it.

A folder contains, for each side of the data, `*.ids.bin` (all ids in a row, little-endian) and `*.offsets.bin` (int64:
the position where each sentence begins, and the end of the last one), and manifest.json with the SHA-256 of each file.
A text has one side, `tokens`, whose sentences are the documents of the text. What exceeds FILE_BYTES goes on in
`*.ids.1.bin`, `*.ids.2.bin` ..., whose bytes in a row are those that one file would have; the same for the offsets.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from manyheads.data.preparing import file_record, read_manifest, refuse_strangers, verify_file, write_data
from manyheads.errors import DataError

FORMAT_VERSION = 2  # manifests contain their own SHA-256 from version 2 on
SEVERAL_FILES = 3  # the version of a store with more than one file for ids or offsets
FILE_BYTES = 2_000_000_000  # of a file at most, a multiple of 8
DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSET_DTYPE = np.dtype("<i8")
FLUSH_TOKENS = 2**20
DIRECT_TOKENS = 2**16  # an array of so many is written by itself
CHECK_TOKENS = 2**24

IntArray = NDArray[np.integer[Any]]
Ids = Sequence[int] | IntArray


def count_ids(ids: NDArray[np.integer[Any]], vocab_size: int) -> NDArray[np.int64]:
    """Return how often each id occurs, at a bounded cost of memory, also of a text that is mapped from a file."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, len(ids), CHECK_TOKENS):
        counts += np.bincount(ids[first : first + CHECK_TOKENS], minlength=vocab_size)
    return counts


@dataclass(frozen=True)
class TokenSide:
    """The sentences of one language, or the documents of a text: number i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: IntArray
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> IntArray:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each sentence."""
        lengths = np.empty(len(self), np.int32)
        for start in range(0, len(self), CHECK_TOKENS):  # in blocks, so that no second copy of the offsets is made
            block = self.offsets[start : start + CHECK_TOKENS + 1]
            lengths[start : start + CHECK_TOKENS] = np.diff(block)
        return lengths


class ArrayOfFiles:
    """Numbers in several mapped files, read like one array: by a position, a slice, or an array of positions.

    A slice within one file is a view; across files it is a copy. All else that an array has (`max`, `astype`, and what
    numpy's functions make of it) copies everything into memory.

    Args: parts: the arrays of the files, of which all but the last have the same length.
    """

    def __init__(self, parts: Sequence[IntArray]) -> None:
        self._parts, self._per_file = list(parts), len(parts[0])
        self._length = sum(map(len, parts))
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return self._length

    def head(self, count: int) -> ArrayOfFiles:
        """Return the first numbers, at least one, without a copy."""
        whole, rest = divmod(count, self._per_file)
        return ArrayOfFiles([*self._parts[:whole], *([self._parts[whole][:rest]] if rest else [])])

    def __getitem__(self, index: Any) -> Any:
        size = self._per_file
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            first = min(start // size, len(self._parts) - 1)
            if step == 1 and stop <= (first + 1) * size:
                return self._parts[first][start - first * size : max(start, stop) - first * size]
            index = np.arange(start, stop, step)
        places = np.asarray(index)
        if places.dtype == np.bool_:
            places = np.flatnonzero(places)
        places = np.where(places < 0, places + self._length, places)
        if places.size and not 0 <= places.min() <= places.max() < self._length:
            raise IndexError(f"a position is outside of {self._length} numbers")
        files, values = places // size, np.empty(places.shape, self.dtype)
        for number in np.unique(files):
            here = files == number
            values[here] = self._parts[number][places[here] - number * size]
        return values if values.shape else values[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> IntArray:
        return np.concatenate(self._parts).astype(dtype or self.dtype, copy=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of Python's protocols, such as copying
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


def _head(numbers: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the first numbers without a copy."""
    first: Any = getattr(numbers, "head", None)  # of an `ArrayOfFiles`
    return cast(NDArray[Any], first(count)) if first is not None and count else numbers[:count]


def mixed_digest(digests: Sequence[str]) -> str:
    """Return the digest of the data sets of a mix, in their order; of one data set, its own."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


@dataclass(frozen=True)
class PairStore:
    """Aligned sentences as ids. `store[i]` is (source ids, target ids), neither with special ids.

    Attributes: digest: SHA-256 over ids and offsets.
    """

    source: TokenSide
    target: TokenSide
    vocab_size: int
    digest: str

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> PairStore:
        """Map a folder written by `write_blocks_of_pairs`.

        Args:
            folder: the folder.
            verify: compare SHA-256 sums and check every id; otherwise compare sizes only.

        Raises: DataError: the folder is missing, damaged, or of a newer format.
        """
        [source, target], vocab_size, digest = _FORMAT.open(Path(folder), verify)
        return cls(source, target, vocab_size, digest)

    @classmethod
    def from_lists(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> PairStore:
        """Return a store in memory, for small data and tests.

        Raises: DataError: an id is outside the vocabulary.
        """
        known = list(pairs)
        columns = [[pair[side] for pair in known] for side in range(2)]
        [source, target], digest = sides_from_lists(columns, vocab_size)
        return cls(source, target, vocab_size, digest)

    def first(self, count: int) -> PairStore:
        """Return a store of the first pairs, which shares the ids."""
        source, target = (TokenSide(side.ids, _head(side.offsets, count + 1)) for side in (self.source, self.target))
        return PairStore(source, target, self.vocab_size, f"{self.digest}[:{count}]")

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[IntArray, IntArray]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        return self.source[index], self.target[index]

    @property
    def source_lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each source, without special ids. (pairs,)"""
        return self.source.lengths

    @property
    def target_lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each target, without special ids. (pairs,)"""
        return self.target.lengths


Rows = tuple[IntArray, IntArray]
"""The ids of many sentences in a row, and the length of each."""


def write_blocks_of_pairs(folder: str | Path, blocks: Iterable[tuple[Rows, Rows]], vocab_size: int) -> int:
    """Write a store; it appears under its name only when it is complete.

    Args:
        folder: must not exist yet.
        blocks: sources and targets, without special ids; consumed as a stream.
        vocab_size: every id must be below it.

    Returns: the number of pairs.
    Raises:
        DataError: an id is outside the vocabulary, or the folder exists.
        SaveError: the disk is full or refuses.
    """

    def fill(*writers: SideWriter) -> None:
        for block in blocks:
            for writer, (ids, lengths) in zip(writers, block, strict=True):
                writer.add(ids, ends=lengths)

    return _FORMAT.write(Path(folder), vocab_size, fill)[0].num_sentences


@dataclass(frozen=True)
class StoreFormat:
    """The format of a folder of ids.

    Attributes:
        name: `format` in the manifest.
        count: the entry of the manifest that counts the sentences of a side.
        sides: names of the sides.
        dtypes: data types of ids, the smallest first; a store has the first that can represent its vocabulary.
    """

    name: str
    count: str
    sides: tuple[str, ...]
    dtypes: tuple[str, ...]

    def write(self, folder: Path, vocab_size: int, fill: Callable[..., None]) -> list[SideWriter]:
        """Write a folder in one step.

        Args:
            folder: must not exist yet.
            vocab_size: every id must be below it.
            fill: called with a writer for each side.

        Returns: the writers.
        Raises: DataError, SaveError: see `write_blocks_of_pairs`.
        """
        dtype = next(name for name in self.dtypes if vocab_size <= 256 ** DTYPES[name].itemsize)
        writers: list[SideWriter] = []

        def write_files(aside: Path) -> dict[str, Any]:
            with ExitStack() as stack:
                for side in self.sides:
                    ids_files, offsets_files = (stack.enter_context(_Files(aside, side, kind)) for kind in KINDS)
                    writers.append(SideWriter(ids_files, offsets_files, DTYPES[dtype], vocab_size))
                fill(*writers)
                for writer in writers:
                    writer.flush()
            names = [path.name for side in self.sides for kind in KINDS for path in _paths(aside, side, kind)]
            is_split = len(names) > len(KINDS) * len(self.sides)
            return {
                "format": self.name,
                "format_version": SEVERAL_FILES if is_split else FORMAT_VERSION,
                self.count: writers[0].num_sentences,
                "vocab_size": vocab_size,
                "dtype": dtype,
                **({"file_bytes": FILE_BYTES} if is_split else {}),
                "files": {name: file_record(aside / name) for name in names},
            }

        write_data(folder, write_files)
        return writers

    def open(self, folder: Path, verify: bool) -> tuple[list[TokenSide], int, str]:
        """Map a folder. Returns: the sides, the size of the vocabulary, and the digest of the content.

        Raises: DataError: see `PairStore.open`.
        """
        manifest = read_manifest(folder, kind=self.name, version=SEVERAL_FILES)
        dtype = DTYPES.get(str(manifest.get("dtype")))
        count, vocab_size = manifest.get(self.count), manifest.get("vocab_size")
        if dtype is None or type(count) is not int or type(vocab_size) is not int or count < 0:
            raise DataError(f"{folder}/manifest.json is damaged: dtype, {self.count} or vocab_size is not valid.")
        sizes = {name: record.get("size") for name, record in manifest["files"].items() if isinstance(record, dict)}
        most: Any = manifest.get("file_bytes")
        paths = {(side, kind): _paths(folder, side, kind, sizes) for side in self.sides for kind in KINDS}
        if (manifest["format_version"] == SEVERAL_FILES) != any(len(known) > 1 for known in paths.values()):
            raise DataError(f"{folder}/manifest.json is damaged: format_version {SEVERAL_FILES} is of several files.")
        for path in (path for known in paths.values() for path in known):
            verify_file(path, manifest["files"].get(path.name), content=verify)
            is_last = path in (known[-1] for known in paths.values())
            if not is_last and (sizes[path.name] != most or most % OFFSET_DTYPE.itemsize):
                raise DataError(
                    f"{path} has {sizes[path.name]} bytes where file_bytes is {most}. Prepare the data again."
                )
        try:
            sides = [map_side(paths[side, "ids"], paths[side, "offsets"], dtype, count) for side in self.sides]
        except OSError as error:
            raise DataError(f"Cannot read {folder}: {error.strerror or error}.") from None
        if verify:
            refuse_strangers(folder, [path.name for known in paths.values() for path in known])
            for side in sides:
                _check_side(side, vocab_size, str(folder))
        content = {key: manifest[key] for key in ("dtype", "files", self.count, "vocab_size")}
        return sides, vocab_size, hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_FORMAT = StoreFormat("manyheads.pairs", "num_pairs", ("source", "target"), ("uint16", "uint32"))


def sides_from_lists(columns: Iterable[Iterable[Sequence[int]]], vocab_size: int) -> tuple[list[TokenSide], str]:
    """Return sides in memory, one for each column of sentences, and the SHA-256 of their content.

    Raises: DataError: an id is outside the vocabulary.
    """
    sides = []
    for column in columns:
        rows = [np.asarray(ids, np.int64) for ids in column]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        sides.append(TokenSide(np.concatenate([*rows, np.empty(0, np.int64)]), offsets))
        _check_side(sides[-1], vocab_size, "The given data")
    content = b"".join(side.ids.tobytes() + side.offsets.tobytes() for side in sides)
    return sides, hashlib.sha256(content).hexdigest()


class SideWriter:
    """Collects the ids of one side and writes them in blocks, so that memory stays small.

    Attributes:
        num_tokens: number of ids added.
        num_sentences: number of sentences that have ended.
        unfinished: whether ids were added after the end of the last sentence.
    """

    def __init__(self, ids_files: _Files, offsets_files: _Files, dtype: np.dtype[Any], vocab_size: int) -> None:
        self._ids_files, self._offsets_files = ids_files, offsets_files
        self._dtype, self._vocab_size = dtype, vocab_size
        self._ids = array("q")
        self._offsets = array("q", [0])
        self.num_tokens = self.num_sentences = 0
        self.unfinished = False

    def add(self, ids: Ids, *, ends: bool | IntArray = True) -> None:
        """Append ids to the current sentence. ends: the sentence ends with them, or the lengths of many sentences."""
        if not isinstance(ids, np.ndarray):
            self._ids.extend(ids)
        elif len(ids) < DIRECT_TOKENS:
            self._ids.frombytes(ids.astype(np.int64).tobytes())
        else:
            self.flush()
            self._write_ids(ids)
        if isinstance(ends, np.ndarray):
            self._offsets.frombytes((self.num_tokens + np.cumsum(ends, dtype=np.int64)).tobytes())
            self.num_sentences += len(ends)
        elif ends:
            self._offsets.append(self.num_tokens + len(ids))
            self.num_sentences += 1
        self.num_tokens += len(ids)
        self.unfinished = ends is False and (self.unfinished or len(ids) > 0)
        if len(self._ids) >= FLUSH_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what was collected. Raises: DataError: an id is outside the vocabulary."""
        self._write_ids(np.frombuffer(self._ids, np.int64) if self._ids else np.empty(0, np.int64))
        self._offsets_files.write(np.frombuffer(self._offsets, np.int64).astype(OFFSET_DTYPE).tobytes())
        self._ids, self._offsets = array("q"), array("q")

    def _write_ids(self, ids: IntArray) -> None:
        if ids.size and not (ids.min() >= 0 and ids.max() < self._vocab_size):
            wrong = ids[(ids < 0) | (ids >= self._vocab_size)][0]
            raise DataError(
                f"Token id {wrong} is outside the vocabulary of {self._vocab_size}; is this the right tokenizer?"
            )
        self._ids_files.write(ids.astype(self._dtype, copy=False).tobytes())


KINDS = ("ids", "offsets")


class _Files:
    """Writes bytes into one file, or into several of FILE_BYTES each."""

    def __init__(self, folder: Path, side: str, kind: str) -> None:
        self._place = folder, side, kind
        self._number, self._room = 0, FILE_BYTES
        self._file: IO[bytes] = _path(*self._place, 0).open("wb")

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        while len(content) > self._room:
            self._file.write(content[: self._room])
            self._file.close()
            content = content[self._room :]
            self._number, self._room = self._number + 1, FILE_BYTES
            self._file = _path(*self._place, self._number).open("wb")
        self._room -= self._file.write(content)


def _path(folder: Path, side: str, kind: str, number: int) -> Path:
    return folder / (f"{side}.{kind}.{number}.bin" if number else f"{side}.{kind}.bin")


def _paths(folder: Path, side: str, kind: str, known: Mapping[str, Any] | None = None) -> list[Path]:
    """Return the files of a side, in order: the first, and the others in `known`, or in the folder."""
    paths = [_path(folder, side, kind, 0)]
    while True:
        path = _path(folder, side, kind, len(paths))
        if path.name not in known if known is not None else not path.exists():
            return paths
        paths.append(path)


def map_side(ids_paths: Sequence[Path], offsets_paths: Sequence[Path], dtype: np.dtype[Any], count: int) -> TokenSide:
    """Map the files of a side and check that they fit each other.

    Raises: DataError: they do not fit. OSError: they cannot be read.
    """
    ids_size, offsets_size = (sum(path.stat().st_size for path in paths) for paths in (ids_paths, offsets_paths))
    if offsets_size != OFFSET_DTYPE.itemsize * (count + 1):
        raise DataError(f"{offsets_paths[0]} does not hold {count + 1} offsets. Prepare the data again.")
    offsets = _mapped(offsets_paths, OFFSET_DTYPE)
    blocks = (offsets[start : start + CHECK_TOKENS + 1] for start in range(0, count, CHECK_TOKENS))
    falls = any((block[1:] < block[:-1]).any() for block in blocks)
    if offsets[0] != 0 or int(offsets[-1]) * dtype.itemsize != ids_size or falls:
        raise DataError(f"{offsets_paths[0]} does not fit {ids_paths[0].name}. Prepare the data again.")
    return TokenSide(_mapped(ids_paths, dtype), offsets)


def _mapped(paths: Sequence[Path], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the numbers in these files, as if they were in one."""
    # An empty file cannot be mapped. ndarray, not memmap, because numpy slices a memmap ten times more slowly.
    parts = [np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype) for path in paths]
    return parts[0] if len(parts) == 1 else cast(NDArray[Any], ArrayOfFiles(parts))


def _check_side(side: TokenSide, vocab_size: int, where: str) -> None:
    """Look at every id. Raises: DataError: one is outside the vocabulary."""
    for start in range(0, len(side.ids), CHECK_TOKENS):
        block = side.ids[start : start + CHECK_TOKENS]
        if block.min() < 0 or block.max() >= vocab_size:
            raise DataError(f"{where} holds token ids outside its vocabulary of {vocab_size}. Prepare the data again.")


_TEXT_FORMAT = StoreFormat("manyheads.tokens", "num_documents", ("tokens",), ("uint8", "uint16", "uint32"))


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
        [side], vocab_size, digest = _TEXT_FORMAT.open(Path(folder), verify)
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
        return TokenStore(TokenSide(_head(self.ids, count), offsets), self.vocab_size, digest, is_cut=True)

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


def write_tokens(folder: str | Path, parts: Iterable[tuple[Ids, bool | IntArray]], vocab_size: int) -> int:
    """Write a store; it appears under its name only when it is complete.

    Args:
        folder: must not exist yet.
        parts: (ids, whether a document ends with them, or the lengths of the documents that they are), consumed as a
            stream; the last document ends with it.
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

    return _TEXT_FORMAT.write(Path(folder), vocab_size, fill)[0].num_tokens
