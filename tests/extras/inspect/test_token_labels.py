"""Tokens as labels: bytes that spell a character show it."""

import pytest

from manyheads.extras.inspect.attending import legible
from manyheads.text.vocabulary import ByteVocabulary


@pytest.mark.parametrize(
    ("tokens", "labels"),
    [
        (["▁the", "</s>"], ["▁the", "</s>"]),
        (["<0x45>", "in"], ["E", "in"]),
        (["<0x0A>", "<0x7F>", "<0x20>"], ["<0x0A>", "<0x7F>", "<0x20>"]),
        (["<0xE4>", "<0xBD>", "<0xA0>", "x"], ["你₁", "你₂", "你₃", "x"]),
        (["<0xE4>", "<0xBD>", "x"], ["<0xE4>", "<0xBD>", "x"]),
        (["<0xE4>", "<0xBD>"], ["<0xE4>", "<0xBD>"]),
        (["<0xC3>", "<0xC3>", "<0xA9>"], ["<0xC3>", "é₁", "é₂"]),
        (["<0xED>", "<0xA0>", "<0x80>"], ["<0xED>", "<0xA0>", "<0x80>"]),  # half a surrogate pair
        (["<0xF5>", "<0x80>", "<0x80>", "<0x80>"], ["<0xF5>", "<0x80>", "<0x80>", "<0x80>"]),
        ([], []),
    ],
)
def test_labels(tokens: list[str], labels: list[str]) -> None:
    assert legible(tokens) == labels


def test_a_whole_text_of_bytes() -> None:
    vocabulary = ByteVocabulary()
    labels = legible(vocabulary.tokens(vocabulary.encode("é 😀")))
    assert labels == ["é₁", "é₂", "▁", "😀₁", "😀₂", "😀₃", "😀₄"]
