"""The embedded slice of Tatoeba: cut as promised, whole, and without a leak."""

import hashlib
from importlib.resources import files
from pathlib import Path

import pytest

from manyheads.data.corpora import DIGESTS, load_tatoeba
from manyheads.data.translation.readers import PairFiles
from manyheads.errors import DataError
from manyheads.extras.sources.cut_tatoeba import cut, group_pairs, main, pack


@pytest.fixture(scope="module")
def splits() -> dict[str, list[tuple[str, str]]]:
    return {split: load_tatoeba(split) for split in DIGESTS}


def test_sizes_and_lengths(splits: dict[str, list[tuple[str, str]]]) -> None:
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 60_000, "valid": 500, "test": 1_000}
    for split in ("valid", "test"):
        assert all(4 <= len(source.split()) <= 20 for source, _ in splits[split])
    assert all(text and text == text.strip() for pairs in splits.values() for pair in pairs for text in pair)


def test_no_sentence_stands_in_two_splits(splits: dict[str, list[tuple[str, str]]]) -> None:
    for side in (0, 1):
        texts = {split: {pair[side] for pair in pairs} for split, pairs in splits.items()}
        assert not texts["train"] & texts["valid"]
        assert not texts["train"] & texts["test"]
        assert not texts["valid"] & texts["test"]
        assert len(texts["test"]) == 1_000
        assert len(texts["valid"]) == 500


def test_groups_are_placed_by_their_hash(splits: dict[str, list[tuple[str, str]]]) -> None:
    hashes = [hashlib.sha256(source.encode()).digest() for source, _ in splits["test"] + splits["valid"]]
    assert hashes == sorted(hashes)


@pytest.mark.slow
def test_the_slice_can_be_cut_again(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(shared / "data" / "tatoeba" / "eng-deu.tsv.gz"), "--into", str(tmp_path)])
    printed = {line.split()[0]: line.split()[2] for line in capsys.readouterr().out.strip().split("\n")}
    assert printed == DIGESTS
    for split, digest in DIGESTS.items():
        pairs = list(PairFiles(tsv=tmp_path / f"tatoeba-en-de.{split}.tsv.gz").read())
        text = "".join(f"{source}\t{target}\n" for source, target in pairs)
        assert hashlib.sha256(text.encode()).hexdigest() == digest
        assert pairs == load_tatoeba(split)


def test_grouping_joins_what_shares_a_side() -> None:
    pairs = [("a", "1"), ("b", "2"), ("c", "1"), ("c", "3"), ("d", "3"), ("e", "e"), ("1", "a")]
    assert group_pairs(pairs) == [
        [("a", "1"), ("c", "1"), ("c", "3"), ("d", "3")],
        [("b", "2")],
        [("e", "e")],
        [("1", "a")],
    ]


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="60000 are needed"):
        cut([("four words are here", "ja")])


def test_packing_gives_the_same_bytes() -> None:
    assert pack([("a", "b")]) == pack([("a", "b")])
    assert pack([("a", "b")])[4:8] == bytes(4)  # no time of day inside


def test_the_attribution_ships_with_the_sentences() -> None:
    text = files("manyheads.data.corpora").joinpath("ATTRIBUTION.txt").read_text(encoding="utf-8")
    assert "Sentences from tatoeba.org by way of www.manythings.org/anki, CC BY 2.0 FR" in text.split("\n")
    shipped = [path for path in files("manyheads.data.corpora").iterdir() if path.name.endswith(".gz")]
    assert len(shipped) == 4
    assert sum(len(path.read_bytes()) for path in shipped) < 2_500_000


def test_damage_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIGESTS, "valid", "0" * 64)
    with pytest.raises(DataError, match=r"valid\.tsv\.gz is damaged; install manyheads again"):
        load_tatoeba("valid")
