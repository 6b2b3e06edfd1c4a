"""The store of one long text: what goes in comes out, in parts of any size, and damage never comes out silently."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import manyheads.data.preparing as data_manifest
from manyheads.data.store import TokenStore, write_tokens
from manyheads.errors import DataError

DOCUMENTS = [[5, 6, 7], [], [255], [1, 2, 3, 4]]


def as_lists(store: TokenStore) -> list[list[int]]:
    return [store.documents[index].tolist() for index in range(store.num_documents)]


def write(folder: Path, documents: list[list[int]], vocab_size: int = 256) -> TokenStore:
    write_tokens(folder, ((document, True) for document in documents), vocab_size)
    return TokenStore.open(folder)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_round_trip_in_parts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    documents = data.draw(st.lists(st.lists(st.integers(0, 69_999), max_size=6), max_size=6))
    parts: list[tuple[object, bool]] = []
    for document in documents:
        cut = data.draw(st.integers(0, len(document)))
        as_array = data.draw(st.booleans())
        for ids, ends in ((document[:cut], False), (document[cut:], True)):
            parts.append((np.array(ids, np.uint32) if as_array else ids, ends))
    folder = tmp_path_factory.mktemp("store") / "train"
    assert write_tokens(folder, iter(parts), 70_000) == sum(map(len, documents))  # type: ignore[arg-type]
    store = TokenStore.open(folder)
    assert as_lists(store) == documents == as_lists(TokenStore.from_lists(documents, 70_000))
    assert store.ids.tolist() == [token for document in documents for token in document]
    assert len(store) == len(store.ids)


def test_a_last_document_needs_no_end(tmp_path: Path) -> None:
    write_tokens(tmp_path / "s", [([1, 2], True), ([], False), ([3], False), ([4], False)], 256)
    assert as_lists(TokenStore.open(tmp_path / "s")) == [[1, 2], [3, 4]]
    write_tokens(tmp_path / "e", [([], False)], 256)
    assert as_lists(TokenStore.open(tmp_path / "e")) == []


def test_ids_take_as_few_bytes_as_they_fit(tmp_path: Path) -> None:
    sizes = ((256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32))
    for vocab_size, dtype in sizes:
        assert write(tmp_path / str(vocab_size), DOCUMENTS, vocab_size).ids.dtype == dtype


def test_blocks_are_written_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.data.store.FLUSH_TOKENS", 2)
    monkeypatch.setattr("manyheads.data.store.CHECK_TOKENS", 2)
    assert as_lists(write(tmp_path / "s", DOCUMENTS)) == DOCUMENTS


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    contents = ([[1, 2], [3]], [[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]])
    digests = [write(tmp_path / str(number), content).digest for number, content in enumerate(contents)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("wrong", [100, -1, 2**40])
def test_ids_outside_the_vocabulary_leave_nothing_behind(tmp_path: Path, wrong: int) -> None:
    for ids in ([wrong], np.array([wrong])):
        with pytest.raises(DataError, match=f"Token id {wrong} is outside the vocabulary of 100"):
            write_tokens(tmp_path / "s", [(ids, True)], 100)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="outside"):
        TokenStore.from_lists([[wrong]], 100)


def test_every_flipped_bit_and_cut_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    whole = write(folder, DOCUMENTS * 5)
    chance = random.Random(1)
    for path in sorted(folder.iterdir()) * 20:
        content = path.read_bytes()
        changed = bytearray(content)
        if chance.random() < 0.3:
            del changed[chance.randrange(len(changed)) :]
        else:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DataError):
            TokenStore.open(folder)
        path.write_bytes(content)
    (folder / "more.bin").touch()
    with pytest.raises(DataError, match="does not list"):
        TokenStore.open(folder)
    assert TokenStore.open(folder, verify=False).digest == whole.digest


@pytest.mark.parametrize(
    "change",
    [
        {"format": "manyheads.pairs"},
        {"format_version": 3},
        {"dtype": "float64"},
        {"num_documents": 10**18},
        {"num_documents": 3},
        {"num_documents": -1},
        {"vocab_size": 255},
        {"vocab_size": None},
        {"files": {}},
        {"files": {"tokens.ids.bin": 3}},
    ],
)
def test_hostile_manifests_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path / "s", DOCUMENTS)
    path = tmp_path / "s" / "manifest.json"
    content = {**json.loads(path.read_text()), **change}
    path.write_bytes(data_manifest._render({**content, "sha256": data_manifest._own_digest(content)}))
    with pytest.raises(DataError) as refusal:
        TokenStore.open(tmp_path / "s")
    assert "changed after it was written" not in str(refusal.value)
