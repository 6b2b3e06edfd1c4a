"""The store of one long text: what goes in comes out, in parts of any size. Its format, and damage: test_store.py."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("wrong", [100, -1, 2**40])
def test_ids_outside_the_vocabulary_leave_nothing_behind(tmp_path: Path, wrong: int) -> None:
    for ids in ([wrong], np.array([wrong])):
        with pytest.raises(DataError, match=f"Token id {wrong} is outside the vocabulary of 100"):
            write_tokens(tmp_path / "s", [(ids, True)], 100)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="outside"):
        TokenStore.from_lists([[wrong]], 100)
