"""The token store: what goes in comes out, and damage never comes out silently."""

import errno
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manyheads.data.preparing as data_manifest
from manyheads.data.language.segments import SegmentStream
from manyheads.data.settings import DataSettings, SegmentSettings
from manyheads.data.store import PairStore, TokenStore, write_tokens
from manyheads.data.translation.batches import TrainingStream
from manyheads.errors import DataError, ManyHeadsError, SaveError
from manyheads.files import commit
from tests.stored_pairs import write_pairs

PAIRS = [([5, 6, 7], [8]), ([], [9, 9]), ([4], []), ([65_535], [10, 11, 12, 13])]
SENTENCE = st.lists(st.integers(0, 69_999), max_size=6)


def as_lists(store: PairStore) -> list[tuple[list[int], list[int]]]:
    return [(store[index][0].tolist(), store[index][1].tolist()) for index in range(len(store))]


@pytest.fixture(params=[2_000_000_000, 8, 24])
def file_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of a file at most: all ids in one, a few ids in each, and more."""
    monkeypatch.setattr("manyheads.data.store.FILE_BYTES", request.param)
    return int(request.param)


@settings(deadline=None, max_examples=50)
@given(pairs=st.lists(st.tuples(SENTENCE, SENTENCE), max_size=8))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[list[int], list[int]]]) -> None:
    folder = tmp_path_factory.mktemp("store") / "train"
    assert write_pairs(folder, iter(pairs), 70_000) == len(pairs)
    store = PairStore.open(folder)
    assert as_lists(store) == pairs == as_lists(PairStore.from_lists(pairs, 70_000))
    assert store.source_lengths.tolist() == [len(source) for source, _ in pairs]
    assert store.target_lengths.tolist() == [len(target) for _, target in pairs]
    assert store.source_lengths.dtype == np.int32


def test_the_first_pairs_are_a_store(tmp_path: Path, file_bytes: int) -> None:
    write_pairs(tmp_path / "train", PAIRS, 65_536)
    whole = PairStore.open(tmp_path / "train")
    for count in range(len(PAIRS) + 1):
        store = whole.first(count)
        assert as_lists(store) == PAIRS[:count]
        assert len(store.source_lengths) == len(store.target_lengths) == count
        assert store.digest != whole.digest


def test_ids_take_two_bytes_where_they_fit(tmp_path: Path) -> None:
    for vocab_size, dtype in ((65_536, np.uint16), (65_537, np.uint32)):
        write_pairs(tmp_path / str(vocab_size), PAIRS, vocab_size)
        assert PairStore.open(tmp_path / str(vocab_size)).source.ids.dtype == dtype


def test_blocks_are_written_in_order(tmp_path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.data.store.FLUSH_TOKENS", 3)
    monkeypatch.setattr("manyheads.data.store.CHECK_TOKENS", 2)
    write_pairs(tmp_path / "s", PAIRS, 65_536)
    assert as_lists(PairStore.open(tmp_path / "s")) == PAIRS


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    digests = []
    for name, pairs in (("a", PAIRS), ("b", PAIRS), ("c", PAIRS[::-1])):
        write_pairs(tmp_path / name, pairs, 65_536)
        digests.append(PairStore.open(tmp_path / name).digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("wrong", [100, -1, 2**40])
def test_ids_outside_the_vocabulary_leave_nothing_behind(tmp_path: Path, wrong: int) -> None:
    with pytest.raises(DataError, match=f"Token id {wrong} is outside the vocabulary of 100"):
        write_pairs(tmp_path / "s", [([1], [wrong])], 100)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="outside"):
        PairStore.from_lists([([1], [wrong])], 100)


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    write_pairs(tmp_path / "s", PAIRS, 65_536)
    with pytest.raises(DataError, match="exists already"):
        write_pairs(tmp_path / "s", PAIRS[:1], 65_536)
    assert len(PairStore.open(tmp_path / "s")) == len(PAIRS)


def test_positions_outside_are_refused(tmp_path: Path) -> None:
    store = PairStore.from_lists(PAIRS, 65_536)
    for index in (-1, len(PAIRS)):
        with pytest.raises(IndexError):
            store[index]


def test_several_files_have_the_bytes_of_one(tmp_path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [([number % 7] * (number % 5), [number]) for number in range(50)]
    write_pairs(tmp_path / "s", pairs, 65_536)
    several = file_bytes < 10**9
    monkeypatch.setattr("manyheads.data.store.FILE_BYTES", 2_000_000_000)
    write_pairs(tmp_path / "one", pairs, 65_536)
    for name in ("source.ids", "source.offsets", "target.ids", "target.offsets"):
        files = [tmp_path / "s" / f"{name}.bin"]
        files += sorted(tmp_path.glob(f"s/{name}.*.bin"), key=lambda path: int(path.suffixes[-2][1:]))
        assert (len(files) > 1) == several
        assert {path.stat().st_size for path in files[:-1]} <= {file_bytes}
        assert b"".join(path.read_bytes() for path in files) == (tmp_path / "one" / f"{name}.bin").read_bytes()
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_bytes())
    assert (manifest["format_version"], "file_bytes" in manifest) == ((3, True) if several else (2, False))
    store, one = PairStore.open(tmp_path / "s"), PairStore.open(tmp_path / "one")
    assert as_lists(store) == as_lists(one) == pairs
    for numbers, expected in ((store.target.ids, one.target.ids), (store.source.offsets, one.source.offsets)):
        places = np.array([[0, 7, -1], [30, 31, 2]])
        for index in (0, -1, slice(3, 40), slice(0, 0), slice(2, None, 7), slice(60, 70), places, expected % 2 == 0):
            assert np.array_equal(numbers[index], expected[index]), index
        assert np.array_equal(np.asarray(numbers), expected)
        assert numbers.max() == expected.max()
        with pytest.raises(IndexError):
            numbers[np.array([len(expected)])]


def test_training_reads_several_files_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [([number % 97] * (number % 5 + 1), [number % 89] * (number % 3)) for number in range(300)]
    batches = []
    for name, size in (("one", 10**9), ("several", 64)):
        monkeypatch.setattr("manyheads.data.store.FILE_BYTES", size)
        write_pairs(tmp_path / name, pairs, 100)
        write_tokens(tmp_path / f"text-{name}", ((source, True) for source, _ in pairs), 100)
        store, text = PairStore.open(tmp_path / name), TokenStore.open(tmp_path / f"text-{name}")
        stream = TrainingStream(
            store, DataSettings(max_tokens=600, max_source_len=20, max_target_len=20), 1, pad_id=0, bos_id=1, eos_id=2
        )
        segments = SegmentStream(text.first(700), SegmentSettings(lanes=4, segment_len=16), 1, end_id=None)
        read = [batch for row in range(2) for batch in (*stream.at(1, row), *segments.at(1, row))]
        batches.append([(name, value) for batch in read for name, value in vars(batch).items()])
    assert len(list(tmp_path.glob("several/*.bin"))) > 40
    for (name, one), (_, several) in zip(*batches, strict=True):
        assert torch.equal(one, several) if isinstance(one, torch.Tensor) else one == several, name


@pytest.mark.one_in(3)
def test_every_flipped_bit_and_cut_is_noticed(tmp_path: Path, file_bytes: int) -> None:
    folder = tmp_path / "s"
    write_pairs(folder, PAIRS * 5, 65_536)
    whole = PairStore.open(folder)
    chance = random.Random(1)
    for path in sorted(folder.glob("*.bin")) * 20:
        content = path.read_bytes()
        changed = bytearray(content)
        if chance.random() < 0.3:
            del changed[chance.randrange(len(changed)) :]
        else:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"Prepare the data again"):
            PairStore.open(folder)
        path.write_bytes(content)
    assert PairStore.open(folder).digest == whole.digest


def test_swapped_and_missing_files_are_noticed(tmp_path: Path) -> None:
    write_pairs(tmp_path / "s", [([5, 6], [7, 8])], 100)
    source, target = tmp_path / "s" / "source.ids.bin", tmp_path / "s" / "target.ids.bin"
    content = source.read_bytes()
    source.write_bytes(target.read_bytes())
    with pytest.raises(DataError, match="SHA-256"):
        PairStore.open(tmp_path / "s")
    source.write_bytes(content)
    target.unlink()
    with pytest.raises(DataError, match="is missing"):
        PairStore.open(tmp_path / "s", verify=False)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"format_version": 3},
        {"format_version": 4},
        {"format_version": True},
        {"dtype": "float64"},
        {"dtype": ["uint16"]},
        {"num_pairs": 10**18},
        {"num_pairs": "4"},
        {"num_pairs": -1},
        {"vocab_size": 6},
        {"vocab_size": None},
        {"files": []},
        {"files": {}},
        {"files": {"source.ids.bin": 3}},
        {"files": {"../../etc/passwd": {"sha256": "", "size": 0}}},
    ],
)
def test_hostile_manifests_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write_pairs(tmp_path / "s", PAIRS, 65_536)
    path = tmp_path / "s" / "manifest.json"
    content = {**json.loads(path.read_text()), **change}
    path.write_bytes(data_manifest._render({**content, "sha256": data_manifest._own_digest(content)}))
    with pytest.raises(DataError) as refusal:
        PairStore.open(tmp_path / "s")
    assert "changed after it was written" not in str(refusal.value)


def test_an_edited_manifest_and_a_stranger_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write_pairs(folder, PAIRS, 65_536)
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for edited in (
        whole + b"\n",
        whole.replace(b'"num_pairs": 4', b'"num_pairs":  4'),
        whole.replace(b"uint16", b"uint32"),
    ):
        assert edited != whole
        path.write_bytes(edited)
        with pytest.raises(DataError, match="changed after it was written"):
            PairStore.open(folder)
    path.write_bytes(whole)
    (folder / "source.ids.copy.bin").touch()
    with pytest.raises(DataError, match=r"source\.ids\.copy\.bin, which its manifest does not list"):
        PairStore.open(folder)
    PairStore.open(folder, verify=False)


def test_a_manifest_of_the_first_format_is_still_read(tmp_path: Path) -> None:
    write_pairs(tmp_path / "s", PAIRS, 65_536)
    path = tmp_path / "s" / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_bytes(data_manifest._render({**content, "format_version": 1}))
    assert len(PairStore.open(tmp_path / "s")) == len(PAIRS)
    path.write_bytes(data_manifest._render(content))
    with pytest.raises(DataError, match="changed after it was written"):
        PairStore.open(tmp_path / "s")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{" * 100_000, b"[" * 100_000])
def test_manifests_that_are_none(tmp_path: Path, content: bytes) -> None:
    write_pairs(tmp_path / "s", PAIRS, 65_536)
    (tmp_path / "s" / "manifest.json").write_bytes(content)
    with pytest.raises(ManyHeadsError):
        PairStore.open(tmp_path / "s")


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json"):
        PairStore.open(tmp_path / "nowhere")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("manyheads.files.commit.sync", full)
    with pytest.raises(SaveError, match=r"No space left on device \(\d+ bytes are free\)"):
        write_pairs(tmp_path / "deep" / "s", PAIRS, 65_536)
    assert list((tmp_path / "deep").iterdir()) == []


def fill(text: str) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "text").write_text(text)
        return {"files": {}}

    return write


def test_a_folder_is_replaced_in_one_step_where_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_manifest.write_data(tmp_path / "data", fill("old"))
    if not commit.swap(tmp_path / "data", tmp_path / "data"):
        pytest.skip("this file system cannot swap names")
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("there was an instant without any"))
    data_manifest.write_data(tmp_path / "data", fill("new"), replace=True)
    assert (tmp_path / "data" / "text").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("failing", [False, True])
def test_an_older_folder_is_put_back_where_names_cannot_be_swapped(tmp_path, monkeypatch, failing):
    data_manifest.write_data(tmp_path / "data", fill("old"))
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if failing and ".old." not in path.name and ".old." not in target.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(commit, "swap", lambda new, old: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(SaveError, match="Input/output") if failing else nullcontext():
        data_manifest.write_data(tmp_path / "data", fill("new"), replace=True)
    assert (tmp_path / "data" / "text").read_text() == ("old" if failing else "new")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
