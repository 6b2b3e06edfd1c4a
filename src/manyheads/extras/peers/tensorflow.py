"""Reading of TensorFlow checkpoints without TensorFlow.

A checkpoint PREFIX is a tensor bundle: PREFIX.index is a sorted table in the format of LevelDB, from the names of
tensors to their places, and PREFIX.data-SSSSS-of-NNNNN are shards with the raw arrays, little endian, in row-major
order. The entries of the table are protocol buffers of three types (tensorflow/core/protobuf/tensor_bundle.proto):

    BundleHeader  (key "")    1 num_shards, 2 endianness
    BundleEntry   (a name)    1 dtype, 2 shape, 3 shard, 4 offset, 5 size, 6 CRC, 7 slices
    TensorShape               2 dim, each with 1 size

Nothing in a file is trusted: every offset, length and count is checked before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyheads.errors import ModelFileError
from manyheads.files.safe_open import check_regular, read_limited

_FOOTER_BYTES = 48
_MAGIC = 0xDB4775248B80FB57
_MOST_INDEX_BYTES = 64 << 20
_MOST_CHECKPOINT_FILE_BYTES = 1 << 20
_MOST_ENTRIES = 100_000
_MOST_DIMENSIONS = 32
_BLOCK_TRAILER = struct.Struct("<BI")  # compression, masked CRC of the block and this byte
_DTYPES: dict[int, tuple[str, torch.dtype]] = {
    1: ("<f4", torch.float32),
    2: ("<f8", torch.float64),
    3: ("<i4", torch.int32),
    9: ("<i8", torch.int64),
    14: ("<i2", torch.bfloat16),  # numpy has no bfloat16: its bits are read as whole numbers
    19: ("<f2", torch.float16),
}
_CRC_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected
_CRC_CHUNK_BYTES = 64 << 20


def find_prefix(path: str | Path) -> Path:
    """Return the prefix of a checkpoint from its folder, its prefix or its index file.

    In a folder the file `checkpoint` names the prefix. Only the last part of that name counts, because the folder may
    have been moved. Without this file the folder must hold exactly one index.

    Raises: ModelFileError: there is no checkpoint, or there are several and none is named.
    """
    path = Path(path)
    if path.suffix == ".index":
        return path.with_suffix("")
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.index"))
    named = _named_prefix(path / "checkpoint")
    if named is not None and path / f"{named}.index" in found:
        return path / named
    if len(found) == 1:
        return found[0].with_suffix("")
    if not found:
        raise ModelFileError(f"{path} holds no TensorFlow checkpoint; a file named like model.ckpt-0.index is needed.")
    names = ", ".join(file.stem for file in found[:5])
    raise ModelFileError(
        f"{path} holds {len(found)} checkpoints ({names}); name one of them, like {path / found[0].stem}."
    )


def _named_prefix(file: Path) -> str | None:
    """Return the last part of `model_checkpoint_path` in a file `checkpoint`, a text protocol buffer."""
    if not file.is_file():
        return None
    try:
        text = read_limited(file, _MOST_CHECKPOINT_FILE_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error}.") from error
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model_checkpoint_path":
            return value.strip().strip('"').replace("\\", "/").rpartition("/")[2] or None
    return None


def read_checkpoint(prefix: str | Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name.

    They are mapped from the data files: a page is read when it is used, and writing changes a private copy. Checksums
    of the index are always compared, those of the data only with the package `crc32c` (see `verifies_data`).

    Args:
        prefix: path of the files without `.index` and `.data-SSSSS-of-NNNNN`.
        wanted: which tensors to read, by name. Moments of an optimiser, for example, take twice the memory of the
            weights.

    Raises: ModelFileError: a file is missing, damaged or no checkpoint; or it uses compression, slices, big-endian
        numbers or a type of tensor that is not supported.
    """
    prefix = Path(prefix)
    index = prefix.with_name(f"{prefix.name}.index")
    try:
        content = read_limited(index, _MOST_INDEX_BYTES)
    except OSError as error:
        raise ModelFileError(f"{index} cannot be read: {error}.") from error
    try:
        num_shards, entries = _read_index(content)
        entries = [entry for entry in entries if wanted(entry.name)]
        return _read_shards(prefix, num_shards, entries)
    except _DamagedError as error:
        raise ModelFileError(f"{prefix} is not a TensorFlow checkpoint that can be read: {error}.") from error
    except OSError as error:
        raise ModelFileError(f"The data of {prefix} cannot be read: {error}.") from error


def verifies_data() -> bool:
    """Whether a package is installed that computes CRC-32C fast enough for gigabytes."""
    return _fast_crc() is not None


class _DamagedError(Exception):
    """The reason why a checkpoint is refused, without its path."""


@dataclass(frozen=True)
class _Entry:
    """The place of a tensor. offset, size: bytes. crc: of these bytes, not masked."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int


def _read_index(content: bytes) -> tuple[int, list[_Entry]]:
    """Return the number of shards and the entries of an index file."""
    if len(content) < _FOOTER_BYTES:
        raise _DamagedError(f"its index has {len(content)} bytes, and the footer alone has {_FOOTER_BYTES}")
    footer = content[-_FOOTER_BYTES:]
    if int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise _DamagedError("its index does not end with the number that marks such tables")
    body = content[:-_FOOTER_BYTES]
    _, end = _block_handle(footer, 0)  # of the block of meta data, which holds none
    handle, _ = _block_handle(footer, end)
    num_shards = 0
    entries: list[_Entry] = []
    last_key: bytes | None = None
    for _, place in _entries_of(_block(body, handle)):
        for key, value in _entries_of(_block(body, _block_handle(place, 0)[0])):
            if last_key is not None and key <= last_key:
                raise _DamagedError("the names in its index are not sorted")
            if len(entries) >= _MOST_ENTRIES:
                raise _DamagedError(f"it has more than {_MOST_ENTRIES:,} tensors")
            if last_key is None:
                if key:
                    raise _DamagedError("its index does not begin with a header")
                num_shards = _header(value)
            else:
                entries.append(_entry(key, value, num_shards))
            last_key = key
    if last_key is None:
        raise _DamagedError("its index is empty")
    return num_shards, entries


def _block_handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Return (offset, size) of a block, and the position behind the handle."""
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _block(body: bytes, handle: tuple[int, int]) -> bytes:
    """Return a block without its trailer, whose CRC is checked."""
    offset, size = handle
    end = offset + size
    if end + _BLOCK_TRAILER.size > len(body):
        raise _DamagedError(f"its index has {len(body)} bytes of blocks, and one of them ends at {end}")
    compression, masked = _BLOCK_TRAILER.unpack_from(body, end)
    if _crc(body[offset : end + 1]) != _unmasked(masked):
        raise _DamagedError("the checksum of its index does not match")
    if compression:
        kind = "snappy" if compression == 1 else f"number {compression}"
        raise _DamagedError(f"its index is compressed ({kind}), which TensorFlow does not do by default")
    return body[offset:end]


def _entries_of(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values. A key is stored without the part that it shares with the key before it."""
    if len(block) < 4:
        raise _DamagedError("a block of its index is too short")
    num_restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (num_restarts + 1)
    if end < 0:
        raise _DamagedError(f"a block of its index names {num_restarts} restarts, more than it can hold")
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        unshared, at = _varint(block, at)
        value_len, at = _varint(block, at)
        if shared > len(key) or at + unshared + value_len > end:
            raise _DamagedError("an entry of its index is longer than its block")
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + value_len]
        at += value_len


def _header(data: bytes) -> int:
    """Return the number of shards."""
    fields = dict(_fields(data))
    if fields.get(2, 0) != 0:
        raise _DamagedError("its numbers are big endian, which is not supported")
    num_shards = fields.get(1, 0)
    if not isinstance(num_shards, int) or not 1 <= num_shards <= _MOST_ENTRIES:
        raise _DamagedError(f"it names {num_shards!r} shards, and 1 to {_MOST_ENTRIES:,} are possible")
    return num_shards


def _entry(key: bytes, data: bytes, num_shards: int) -> _Entry:
    """Return one entry of the index."""
    try:
        name = key.decode("utf-8")
    except UnicodeDecodeError:
        raise _DamagedError("a name in its index is not UTF-8") from None
    fields = dict(_fields(data))
    if 7 in fields:
        raise _DamagedError(f"{name} is stored in slices, which is not supported")
    numbers = {number: fields.get(number, 0) for number in (1, 3, 4, 5, 6)}
    shape = fields.get(2, b"")
    if not all(isinstance(value, int) for value in numbers.values()) or not isinstance(shape, bytes):
        raise _DamagedError(f"the entry of {name} has a field of the wrong type")
    dtype, shard, offset, size, masked = (int(value) for value in numbers.values())
    if shard >= num_shards:
        raise _DamagedError(f"{name} is in shard {shard}, and there are {num_shards}")
    return _Entry(name, dtype, _shape(name, shape), shard, offset, size, _unmasked(masked))


def _shape(name: str, data: bytes) -> tuple[int, ...]:
    """Return the shape of a tensor."""
    sizes = []
    for number, value in _fields(data):
        if number == 3 and value:
            raise _DamagedError(f"{name} has no known number of dimensions")
        if number == 2:
            if not isinstance(value, bytes):
                raise _DamagedError(f"the shape of {name} has a field of the wrong type")
            size = dict(_fields(value)).get(1, 0)
            if not isinstance(size, int) or size >= 1 << 63:  # negative: the size is not known
                raise _DamagedError(f"the shape of {name} has a dimension of unknown size")
            sizes.append(size)
    if len(sizes) > _MOST_DIMENSIONS:
        raise _DamagedError(f"{name} has {len(sizes)} dimensions, and at most {_MOST_DIMENSIONS} are possible")
    return tuple(sizes)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of the fields of a protocol buffer: whole numbers, or bytes of what has a length."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise _DamagedError(f"its index holds a field of type {kind}, which does not exist")
        if at + length > len(data):
            raise _DamagedError("a field of its index is longer than its entry")
        part = data[at : at + length]
        yield number, part if kind == 2 else int.from_bytes(part, "little")
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a whole number of up to 64 bits, seven bits a byte, the lowest first; and the position behind it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise _DamagedError("its index ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
    raise _DamagedError("its index holds a number of more than 64 bits")


def _read_shards(prefix: Path, num_shards: int, entries: list[_Entry]) -> dict[str, Tensor]:
    """Return the tensors of these entries."""
    fast_crc = _fast_crc()
    tensors: dict[str, Tensor] = {}
    mapped: dict[int, np.ndarray] = {}
    ends: dict[int, tuple[int, str]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.shard, entry.offset, entry.size)):
        if entry.dtype not in _DTYPES:
            raise _DamagedError(f"{entry.name} has type number {entry.dtype} of TensorFlow, which is not supported")
        layout, dtype = _DTYPES[entry.dtype]
        width = np.dtype(layout).itemsize
        if entry.size != math.prod(entry.shape) * width:
            raise _DamagedError(
                f"{entry.name} has {entry.size:,} bytes, which is not the size of {list(entry.shape)} numbers of"
                f" {width} bytes"
            )
        end, before = ends.get(entry.shard, (0, ""))
        if entry.size and entry.offset < end:
            raise _DamagedError(f"{entry.name} and {before} overlap")
        if entry.shard not in mapped:
            mapped[entry.shard] = _map_shard(prefix, entry.shard, num_shards)
        shard = mapped[entry.shard]
        if entry.offset + entry.size > len(shard):
            raise _DamagedError(
                f"{entry.name} ends at byte {entry.offset + entry.size:,} of a data file of {len(shard):,} bytes; the"
                " file is cut off, or belongs to another checkpoint"
            )
        raw = shard[entry.offset : entry.offset + entry.size]
        if fast_crc is not None and fast_crc(raw) != entry.crc:
            raise _DamagedError(f"the checksum of {entry.name} does not match; copy its data file again")
        if entry.size:
            ends[entry.shard] = (entry.offset + entry.size, entry.name)
        tensors[entry.name] = _tensor(raw, layout, dtype, entry.shape)
    return {name: tensors[name] for name in sorted(tensors)}


def _map_shard(prefix: Path, shard: int, num_shards: int) -> np.ndarray:
    """Return the bytes of a data file, mapped copy-on-write."""
    path = prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{num_shards:05d}")
    check_regular(path)
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="c")


def _tensor(raw: np.ndarray, layout: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    array = raw.view(layout) if raw.ctypes.data % np.dtype(layout).itemsize == 0 else raw.copy().view(layout)
    tensor = torch.from_numpy(array)
    return tensor.view(dtype).reshape(shape)


def _unmasked(masked: int) -> int:
    """Return a CRC as it was before it was masked, so that a CRC of data that holds CRCs has no pattern (LevelDB)."""
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def _fast_crc() -> Callable[[np.ndarray], int] | None:
    """Return a function for the CRC of data of any size, or None without the package `crc32c`."""
    try:
        from crc32c import crc32c
    except ImportError:
        return None

    def compute(raw: np.ndarray) -> int:
        value = 0
        for begin in range(0, len(raw), _CRC_CHUNK_BYTES):
            value = crc32c(raw[begin : begin + _CRC_CHUNK_BYTES].data, value)
        return value

    return compute


def _crc(data: bytes) -> int:
    """Return the CRC-32C of an index's block, some megabytes a second."""
    table = _crc_table()
    value = 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


@cache
def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_CRC_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table
