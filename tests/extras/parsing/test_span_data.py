"""Trees as spans on disk, their batches, and the folders that hold them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads.data.translation.prepared import PreparedData
from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.span_data import (
    MOST_HASHES,
    MOST_PIECES,
    SpanData,
    SpanRow,
    SpanStore,
    SpanStream,
    affix_hashes,
    collate_spans,
    eval_spans,
    open_spans,
    word_pieces,
    write_spans,
)
from manyheads.extras.parsing.span_task.prepare import prepare_spans
from manyheads.extras.parsing.span_task.settings import SpanSettings
from manyheads.extras.parsing.tokenizer import ParsingTask, TreeFile
from manyheads.extras.parsing.trees import ParsingSettings
from manyheads.text.settings import TokenizerSettings

TREES = """(ROOT (S (NP (PRP She)) (VP (VBZ sleeps)) (. .)))
(ROOT (NP (NNS Results)))
(ROOT (S (VP (VB Go)) (. !)))
"""
OTHER = "(ROOT (INTJ (UH Oh)))\n(ROOT (S (NP (PRP She)) (VP (VBZ sleeps)) (. .)))\n"
TASK = ParsingTask(ParsingSettings(tags="keep"))
TOKENIZER = TokenizerSettings(vocab_size=300)


def row(length: int, seed: int = 0) -> SpanRow:
    pieces = [[(seed + word) % 9] * (1 + word % 3) for word in range(length)]
    return SpanRow(
        pieces, [list(range(word, word + MOST_HASHES)) for word in range(length)], [1] * length, [(0, length, 2)]
    )


def rows(*lengths: int) -> list[SpanRow]:
    return [row(length, seed) for seed, length in enumerate(lengths)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, TreeFile]:
    for name, text in (("train", TREES), ("valid", OTHER)):
        (tmp_path / f"{name}.ptb").write_text(text)
    return {name: TreeFile(path=tmp_path / f"{name}.ptb", task=TASK) for name in ("train", "valid")}


def test_a_batch() -> None:
    store = SpanStore.from_rows([SpanRow([[5], [6, 7]], [[1] * 10, [2] * 10], [1, 0], [(0, 2, 3), (1, 2, 1)]), row(1)])
    batch = collate_spans(store, np.array([1, 0]), pad_to_multiple=3)
    assert batch.lengths.tolist() == [1, 2]
    assert batch.pieces.shape == (2, 3, MOST_PIECES)
    assert batch.pieces[1, :, :3].tolist() == [[6, 0, 0], [7, 8, 0], [0, 0, 0]]  # 0 is no piece
    assert batch.affixes[1].tolist() == [[1] * 10, [2] * 10, [0] * 10]
    assert batch.tags.tolist() == [[0, 0, 0], [0, -1, 0]]  # -1 is unknown
    assert batch.labels[1].tolist() == [[0, 3, 0], [0, 1, 0], [0, 0, 0]]
    assert batch.num_target_tokens() == 3
    assert batch.size == 6
    assert batch.describe() == "2 sentences of 3 words"
    assert batch.rows(slice(1, 2)).lengths.tolist() == [2]


def test_a_store_comes_back(tmp_path: Path) -> None:
    assert write_spans(tmp_path / "store", rows(3, 1, 4)) == 3
    stored, made = SpanStore.open(tmp_path / "store"), SpanStore.from_rows(rows(3, 1, 4))
    places = np.arange(3)
    for one, other in zip(
        vars(collate_spans(stored, places)).values(), vars(collate_spans(made, places)).values(), strict=True
    ):
        assert torch.equal(one, other)
    assert stored.largest_label == 2
    (tmp_path / "store/tag.ids.bin").write_bytes(b"\0" * 32)
    with pytest.raises(DataError, match=r"tag\.ids\.bin"):
        SpanStore.open(tmp_path / "store")


def test_parts_that_do_not_fit() -> None:
    for wrong in (SpanRow([[1]], [[1] * 3], [1]), SpanRow([[1], [2]], [[1] * 10, [2] * 10], [1]), SpanRow([], [], [])):
        with pytest.raises(DataError, match="Prepare the data again"):
            SpanStore.from_rows([row(2), wrong])


def test_every_sentence_is_evaluated_once() -> None:
    store = SpanStore.from_rows(rows(5, 1, 3, 9, 2, 2))
    batches = list(eval_spans(store, 6))
    assert sorted(sample for batch in batches for sample in batch.sample_ids.tolist()) == list(range(6))
    assert all(batch.size <= 6 or len(batch.lengths) == 1 for batch in batches)
    assert batches[-1].lengths.tolist() == [9]  # longer than the budget, alone


def test_an_epoch_has_every_sentence_that_is_not_too_long() -> None:
    store = SpanStore.from_rows(rows(5, 1, 30, 9, 2, 2))
    stream = SpanStream(store, SpanSettings(max_tokens=20, max_len=10, accumulate=2, pad_to_multiple=2), seed=3)
    seen = [
        sample
        for place in range(stream.rows(0))
        for batch in stream.at(0, place)
        for sample in batch.sample_ids.tolist()
    ]
    assert sorted(seen) == [0, 1, 3, 4, 5]
    assert all(batch.tags.shape[1] % 2 == 0 for batch in stream.at(0, 0))
    assert stream.describe() == "5 of 6 training sentences kept, the longest has 30 words; data.max_len is 10"
    with pytest.raises(DataError, match="sentence 3 with 30 words"):
        SpanStream(store, SpanSettings(max_len=10, too_long="fail"), seed=3)
    with pytest.raises(DataError, match="No training sentences are left"):
        SpanStream(SpanStore.from_rows(rows(8)), SpanSettings(max_len=4), seed=3)


def test_a_prepared_folder(files: dict[str, TreeFile], tmp_path: Path) -> None:
    manifest = prepare_spans(tmp_path / "data", **files, tokenizer=TOKENIZER)
    data = open_spans(str(tmp_path / "data"))
    assert data.constituents == ("NP", "S", "VP")
    assert data.tags == (".", "NNS", "PRP", "VB", "VBZ")
    assert data.root == "ROOT"
    assert manifest["counts"]["valid"]["unknown_labels"] == manifest["counts"]["valid"]["unknown_tags"] == 1
    assert data.texts["valid"] == [("Oh", "(ROOT (INTJ (UH Oh)))"), ("She sleeps .", TREES.splitlines()[0])]
    assert not list((tmp_path / "data").glob("train.*"))
    batch = collate_spans(data.train, np.arange(3))
    words = ["She", "sleeps", "."]
    assert batch.labels[0].tolist() == [[1, 0, 2], [0, 3, 0], [0, 0, 0]]
    assert batch.tags[0].tolist() == [2, 4, 0]
    pieces = word_pieces(words, data.tokenizer)
    assert [[index - 1 for index in ids if index] for ids in batch.pieces[0].tolist()] == pieces
    assert batch.affixes[0].tolist() == [affix_hashes(word) for word in words]
    assert data.valid is not None
    assert collate_spans(data.valid, np.array([0])).tags.tolist() == [[-1]]
    assert "train: 3 trees, 6 words" in data.describe()


def test_what_is_refused(files: dict[str, TreeFile], tmp_path: Path) -> None:
    (tmp_path / "empty.ptb").write_text("\n")
    empty: Any = TreeFile(path=tmp_path / "empty.ptb", task=TASK)
    for given, message in (
        ({"train": empty}, "no train trees in"),
        ({"train": files["train"], "test": empty}, "no test trees in"),
    ):
        with pytest.raises(DataError, match=message):
            prepare_spans(tmp_path / "data", **given, tokenizer=TOKENIZER)
    rootless = TreeFile(path=tmp_path / "train.ptb", task=ParsingTask(ParsingSettings(root=None)))
    with pytest.raises(ConfigError, match="under a root"):
        prepare_spans(tmp_path / "data", train=rootless, tokenizer=TOKENIZER)
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match=r"data\.path is not set"):
        open_spans("")
    with pytest.raises(DataError, match="no such folder"):
        open_spans(str(tmp_path / "data"))
    prepare_spans(tmp_path / "data", **files, tokenizer=TOKENIZER)
    with pytest.raises(DataError, match="holds trees for a chart parser"):
        PreparedData.open(tmp_path / "data")
    manifest = tmp_path / "data/manifest.json"
    manifest.write_text(manifest.read_text().replace('"NNS"', '"NN"'))
    with pytest.raises(DataError, match="was changed after it was written"):
        SpanData.open(tmp_path / "data", verify=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 100, "max_len": 200}, "leaves fewer than 200 words"),
        ({"max_len": 5000}, "max_len"),
        ({"accumulate": 0}, "accumulate"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpanSettings(**settings)  # type: ignore[arg-type]
