"""The reader of TensorFlow checkpoints against files that TensorFlow wrote, and against damaged ones."""

import hashlib
import json
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c

from manyheads.errors import ModelFileError
from manyheads.extras.peers.tensorflow import find_prefix, read_checkpoint, verifies_data

CASES = (
    *("enwik8", "enwik8_short_mem", "enwik8_short_mem_same_length", "enwik8_no_mem", "embed_projection", "wt103"),
    *("wt103_same_length_off", "wt103_small_norms", "wt103_base", "div1_embed_projection", "lm1b", "lm1b_training"),
    *("text8_trained", "text8_averaged"),
)
SHARD = "data-00000-of-00001"


@pytest.fixture
def copied(fixtures: Path, tmp_path: Path) -> Path:
    """The prefix of a copy of a small checkpoint that may be changed."""
    folder = tmp_path / "wt103"
    shutil.copytree(fixtures / "wt103", folder)
    for file in (folder, *folder.iterdir()):
        file.chmod(0o755)
    return folder / "model.ckpt-0"


@pytest.mark.parametrize("case", CASES)
def test_every_variable_has_the_recorded_name_type_shape_and_bytes(fixtures: Path, case: str) -> None:
    recorded = json.loads((fixtures / f"{case}.json").read_text())["checkpoint"]
    prefix = find_prefix(fixtures / case)
    assert prefix == fixtures / recorded["prefix"]
    found = read_checkpoint(prefix)
    described = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "sha256": hashlib.sha256(tensor.numpy().tobytes()).hexdigest(),
        }
        for name, tensor in found.items()
    }
    assert described == recorded["variables"]


def test_every_case_is_tested(fixtures: Path) -> None:
    assert {file.stem for file in fixtures.glob("*.json")} == set(CASES)


def test_only_what_is_wanted_is_read(fixtures: Path) -> None:
    prefix = find_prefix(fixtures / "lm1b_training")
    weights = read_checkpoint(prefix, lambda name: "Adam" not in name)
    assert "global_step" in weights
    assert not [name for name in weights if "Adam" in name]


def test_tensors_can_be_changed_without_changing_the_file(copied: Path) -> None:
    before = copied.with_name(f"{copied.name}.{SHARD}").read_bytes()
    for tensor in read_checkpoint(copied).values():
        tensor.zero_()
    assert copied.with_name(f"{copied.name}.{SHARD}").read_bytes() == before


def test_a_folder_without_the_file_checkpoint_must_hold_one_index(copied: Path) -> None:
    folder = copied.parent
    (folder / "checkpoint").unlink()
    assert find_prefix(folder) == copied
    shutil.copy(f"{copied}.index", folder / "model.ckpt-9.index")
    with pytest.raises(ModelFileError, match=r"2 checkpoints \(model.ckpt-0, model.ckpt-9\)"):
        find_prefix(folder)
    assert find_prefix(folder / "model.ckpt-9.index") == folder / "model.ckpt-9"


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="holds no TensorFlow checkpoint"):
        find_prefix(tmp_path)


def test_no_byte_of_an_index_can_be_changed_unnoticed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "crc32c", None)  # the data does not change here
    index = Path(f"{copied}.index")
    content = index.read_bytes()
    whole = read_checkpoint(copied)
    harmless = 0
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        index.write_bytes(changed)
        try:
            found = read_checkpoint(copied)
        except ModelFileError:
            continue
        harmless += 1
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert harmless < 64  # the block of meta data, which is not read, its place, and the padding of the footer


@pytest.mark.parametrize("count", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_an_index_with_right_checksums_and_wrong_content_is_refused(copied, monkeypatch, count):
    """The parsers of blocks, entries and fields get past the checksum here."""
    monkeypatch.setitem(sys.modules, "crc32c", None)
    index = Path(f"{copied}.index")
    content = index.read_bytes()
    end = next(n for n in range(8, len(content)) if content[n + 1 : n + 5] == masked_crc(content[: n + 1]))
    draw = random.Random(5)
    reasons = []
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 5))):
            changed[draw.randrange(end)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        changed[end + 1 : end + 5] = masked_crc(bytes(changed[: end + 1]))
        index.write_bytes(changed)
        try:
            read_checkpoint(copied)
        except ModelFileError as error:
            reasons.append(str(error))
    assert not [reason for reason in reasons if "checksum" in reason]
    assert count // 4 < len(reasons) < count  # a name or an offset can change and still be valid


def test_a_changed_byte_of_the_data_is_noticed(copied: Path) -> None:
    assert verifies_data()
    data = copied.with_name(f"{copied.name}.{SHARD}")
    content = bytearray(data.read_bytes())
    content[1000] ^= 4
    data.write_bytes(content)
    with pytest.raises(
        ModelFileError, match=r"the checksum of transformer/.* does not match; copy its data file again"
    ):
        read_checkpoint(copied)


def test_without_a_fast_checksum_data_is_not_verified(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "crc32c", None)
    assert not verifies_data()
    data = copied.with_name(f"{copied.name}.{SHARD}")
    data.write_bytes(bytes(len(data.read_bytes())))
    assert not any(tensor.any() for tensor in read_checkpoint(copied).values())


@pytest.mark.parametrize("data", [b"cut off", b""])
def test_data_that_is_cut_off_is_refused(copied: Path, data: bytes) -> None:
    copied.with_name(f"{copied.name}.{SHARD}").write_bytes(data)
    with pytest.raises(ModelFileError, match=rf"ends at byte .* of a data file of {len(data)} bytes; the file is cut"):
        read_checkpoint(copied)


def test_missing_files_are_named(copied: Path) -> None:
    copied.with_name(f"{copied.name}.{SHARD}").unlink()
    with pytest.raises(ModelFileError, match=SHARD):
        read_checkpoint(copied)
    with pytest.raises(ModelFileError, match=r"model.ckpt-7.index cannot be read"):
        read_checkpoint(copied.with_name("model.ckpt-7"))


# A small writer of bundles, for what TensorFlow's Saver does not write by itself.


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            out += varint(number << 3) + varint(value)
    return out


def shape(*sizes: int) -> bytes:
    return message(*((2, message((1, size))) for size in sizes))


def masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def block(entries: dict[bytes, bytes], compression: int = 0) -> bytes:
    body = b"".join(varint(0) + varint(len(key)) + varint(len(value)) + key + value for key, value in entries.items())
    body += struct.pack("<II", 0, 1) + bytes([compression])
    return body + masked_crc(body)


def write(prefix: Path, entries: dict[bytes, bytes], shards: list[bytes], compression: int = 0) -> None:
    data = block(entries, compression)
    meta = block({})
    index = block({b"\xff": varint(0) + varint(len(data) - 5)})
    handles = varint(len(data)) + varint(len(meta) - 5) + varint(len(data) + len(meta)) + varint(len(index) - 5)
    footer = handles.ljust(40, b"\0") + (0xDB4775248B80FB57).to_bytes(8, "little")
    Path(f"{prefix}.index").write_bytes(data + meta + index + footer)
    for number, content in enumerate(shards):
        Path(f"{prefix}.data-{number:05d}-of-{len(shards):05d}").write_bytes(content)


def entry(
    data: bytes, dtype: int, sizes: bytes, *others: tuple[int, int | bytes], shard: int = 0, at: int = 0
) -> bytes:
    places = message((1, dtype), (2, sizes), (3, shard), (4, at), (5, len(data)))
    return places + varint(6 << 3 | 5) + masked_crc(data) + message(*others)


def test_two_shards_all_types_and_places_that_are_not_aligned(tmp_path: Path) -> None:
    tensors = {
        "a": torch.tensor([[1.5, -2.0]]),
        "b": torch.tensor([1.5, 2.5], dtype=torch.float64),
        "c": torch.tensor([7], dtype=torch.int32),
        "d": torch.tensor(-9),
        "e": torch.tensor([0.1, 3.0], dtype=torch.bfloat16),
        "f": torch.tensor([0.1], dtype=torch.float16),
        "g": torch.zeros(0, 3),
    }
    numbers = dict(zip("abcdefg", (1, 2, 3, 9, 14, 19, 1), strict=True))
    shards = [b"?", b"??"]
    entries = {b"": message((1, 2))}
    for place, (name, tensor) in enumerate(tensors.items()):
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        number = place % 2
        entries[name.encode()] = entry(raw, numbers[name], shape(*tensor.shape), shard=number, at=len(shards[number]))
        shards[number] += raw
    write(tmp_path / "model", entries, shards)
    found = read_checkpoint(tmp_path / "model")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


FOUR = b"\0" * 4
HEADER = message((1, 1))
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "big endian": (lambda p: write(p, {b"": message((1, 1), (2, 1))}, [b""]), "big endian"),
    "slices": (lambda p: write(p, {b"": HEADER, b"w": entry(FOUR, 1, shape(1), (7, b""))}, [FOUR]), "w is .* slices"),
    "snappy": (lambda p: write(p, {b"": HEADER}, [b""], compression=1), r"compressed \(snappy\)"),
    "zstd": (lambda p: write(p, {b"": HEADER}, [b""], compression=2), r"compressed \(number 2\)"),
    "strings": (lambda p: write(p, {b"": HEADER, b"w": entry(FOUR, 7, shape(1))}, [FOUR]), "w has type number 7"),
    "size": (lambda p: write(p, {b"": HEADER, b"w": entry(FOUR, 1, shape(2))}, [FOUR * 2]), r"w has 4 bytes.* \[2\]"),
    "huge": (lambda p: write(p, {b"": HEADER, b"w": entry(FOUR, 1, shape(1 << 62, 1 << 62))}, [FOUR]), "w has 4 bytes"),
    "unknown": (lambda p: write(p, {b"": HEADER, b"w": entry(FOUR, 1, shape(2**64 - 1))}, [FOUR]), "unknown size"),
    "rank": (lambda p: write(p, {b"": HEADER, b"w": entry(FOUR, 1, shape(*[1] * 33))}, [FOUR]), "33 dimensions"),
    "shard": (lambda p: write(p, {b"": HEADER, b"w": entry(FOUR, 1, shape(1), shard=1)}, [FOUR]), "w is in shard 1"),
    "overlap": (
        lambda p: write(
            p, {b"": HEADER, b"v": entry(FOUR, 1, shape(1)), b"w": entry(FOUR, 1, shape(1), at=2)}, [FOUR * 2]
        ),
        "w and v overlap",
    ),
    "no header": (lambda p: write(p, {b"w": entry(FOUR, 1, shape(1))}, [FOUR]), "does not begin with a header"),
    "empty": (lambda p: write(p, {}, []), "its index is empty"),
    "not sorted": (
        lambda p: write(p, {b"": HEADER, b"w": entry(FOUR, 1, shape(1)), b"v": entry(FOUR, 1, shape(1))}, [FOUR]),
        "not sorted",
    ),
    "no shards": (lambda p: write(p, {b"": message((1, 0))}, []), "names 0 shards"),
    "a pickle": (lambda p: Path(f"{p}.index").write_bytes(b"\x80\x02}q\x00." * 20), "does not end with the number"),
    "short": (lambda p: Path(f"{p}.index").write_bytes(b"x"), "its index has 1 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make, reason = REFUSED[name]
    make(tmp_path / "model")
    with pytest.raises(ModelFileError, match=reason):
        read_checkpoint(tmp_path / "model")
