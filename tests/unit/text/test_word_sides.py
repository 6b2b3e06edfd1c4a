"""Words and ids that another program gave."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyheads.errors import DataError
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.word_sides import WordSides

MARKS = ["<s>", "</s>", "<blank>", "<unk>"]
SPECIAL = {"pad": 2, "bos": 0, "eos": 1}
WORDS = WordSides([*MARKS, "Ein", "Mann", ",", "z.B."], [*MARKS, "A", "man"], SPECIAL)


def test_words() -> None:
    """Signs are split off only where the whole is no word; a word that is spelled like a mark is unknown."""
    assert WORDS.source.encode_batch(["Ein Mann,", "z.B. Hund", "", "</s>"]) == [
        [0, 4, 5, 6],
        [0, 7, 3],
        [],
        [0, 3],
    ]
    assert WORDS.source.ends_sources
    assert WORDS.target.decode([0, 4, 5, 3, 1, 2]) == "A man <unk>"
    assert WORDS.target.tokens([4, 1]) == ["A", "</s>"]
    assert (WORDS.kind, WORDS.splits_lines, WORDS.fits(8, 6), WORDS.fits(7, 6)) == ("word", True, True, False)


def test_a_source_has_the_marks_of_its_vocabulary() -> None:
    """In the edition of 2018 sources have neither beginning nor end."""
    sides = WordSides(["<unk>", "<blank>", "Ein"], ["<unk>", "<blank>", "<s>", "</s>"], {"pad": 1, "bos": 2, "eos": 3})
    assert sides.source.encode("Ein Ein") == [2, 2]
    assert not sides.source.ends_sources


def test_ids() -> None:
    sides = WordSides(9, 31, SPECIAL | {"bos": 30})
    assert sides.source.encode_batch(["0 5\n8", " "]) == [[0, 5, 8], []]
    assert not sides.source.ends_sources
    assert sides.target.decode([30, 4, 5, 1]) == "4 5"
    assert (sides.kind, sides.splits_lines) == ("ids", False)
    for wrong in ("9", "-1", "a", "1.0", "²"):
        with pytest.raises(DataError, match="from 0 to 8"):
            sides.source.encode(wrong)


@pytest.mark.parametrize("sides", [WORDS, WordSides(11, 12, SPECIAL)])
def test_files(sides: WordSides, tmp_path: Path) -> None:
    for name, content in sides.files().items():
        (tmp_path / name).write_bytes(content)
    again: Any = load_tokenizer(tmp_path)
    assert (again.digest, again.kind) == (sides.digest, sides.kind)
    assert again.source.encode("4 5") == sides.source.encode("4 5")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": None}, "damaged"),
        ({"source": [1]}, "damaged"),
        ({"special": {"pad": 0}}, "damaged"),
        ({"special": {**SPECIAL, "pad": True}}, "damaged"),
        ({"source": 7}, "one side has words"),
        ({"target": []}, "1 to 4,000,000 words, not 0"),
        ({"target": ["a", "b"]}, "pad 2"),
        ({"source": ["a", "b", "a"]}, "the word 'a' twice"),
    ],
)
def test_damaged_files(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    content = {**json.loads(WORDS.files()["tokenizer.json"]), **change}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(DataError, match=said):
        load_tokenizer(tmp_path)
