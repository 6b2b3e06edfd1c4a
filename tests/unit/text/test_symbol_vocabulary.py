"""Vocabularies with a given list of symbols."""

from typing import Any

import pytest

from manyheads.errors import DataError
from manyheads.text.of_folder import load_vocabulary, vocabulary_from_json
from manyheads.text.word_vocabulary import SymbolVocabulary

BYTES: dict[str, Any] = {"symbols": ["32", "97", "195", "169"], "form": "bytes", "lines": "dropped"}
LETTERS: dict[str, Any] = {"symbols": ["_", "a", "b"], "form": "characters", "lines": "dropped", "lowercase": True}
ENDED: dict[str, Any] = {"symbols": ["<eos>", "a", "b"], "form": "words", "lines": "end", "line": "<eos>"}
AROUND: dict[str, Any] = {
    **{"symbols": ["<S>", "<UNK>", "a", "b"], "form": "words", "lines": "around"},
    **{"line": "<S>", "unknown": "<UNK>"},
}


@pytest.mark.parametrize(
    ("settings", "text", "ids", "decoded"),
    [
        (BYTES, "a \u00e9\na", [1, 0, 2, 3, 1], "a \u00e9a"),
        (LETTERS, "a B", [1, 0, 2], "a b"),
        (ENDED, "a b\n\nb\n", [1, 2, 0, 0, 2, 0], "a b\n\nb\n"),
        (AROUND, "a c\n\nb\n", [0, 2, 1, 0, 0, 0, 0, 3, 0], "a <UNK>\n\nb\n"),
        (AROUND, "a", [0, 2], "a"),
        (AROUND, "", [], ""),
        (ENDED, "", [], ""),
    ],
)
def test_lines_and_unknown_words(settings, text, ids, decoded, tmp_path):
    made = SymbolVocabulary(**settings)
    assert made.encode(text) == ids
    assert made.encode_content(text.encode()) == ids
    assert made.decode(ids) == decoded
    (tmp_path / "tokenizer.json").write_text(made.to_json())
    again = load_vocabulary(tmp_path)
    assert again.encode(text) == ids
    assert again.digest == made.digest


@pytest.mark.parametrize("settings", [BYTES, LETTERS, ENDED, AROUND])
def test_a_text_shown_token_by_token_is_the_text(settings: dict[str, Any]) -> None:
    made = SymbolVocabulary(**settings)
    ids = made.encode("a a\na\n") if settings["form"] != "bytes" else [1, 0, 2, 3]
    shown = b"".join(made.continuation(ids[:place], ids[place : place + 1]) for place in range(len(ids)))
    assert shown == made.decode_bytes(ids)


@pytest.mark.parametrize(
    ("settings", "text", "reason"),
    [(BYTES, "b", "has the byte '98'"), (LETTERS, "ac", "has the character 'c'"), (ENDED, "a c", "has the word 'c'")],
)
def test_text_without_a_symbol_is_refused(settings: dict[str, Any], text: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        SymbolVocabulary(**settings).encode(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"symbols": ["<eos>", "a", "a"]}, "symbols, each once"),
        ({"symbols": ["a"]}, "no symbol '<eos>'"),
        ({"symbols": ["<eos>", "a b"]}, "'a b' is not one of the form 'words'"),
        ({"unknown": "<unk>"}, "no symbol '<unk>'"),
        ({"lines": "dropped", "line": ""}, "words need 'end' or 'around'"),
        ({"form": "bytes", "symbols": ["<eos>", "256"]}, "lines is 'end'"),
    ],
)
def test_lists_that_are_no_vocabulary(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        SymbolVocabulary(**{**ENDED, **changes})


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"form": "words"', '"form": "verbs"', "form 'verbs'"),
        ('"lowercase": false', '"lowercase": 1', "lowercase 1"),
        ('"documents": "none"', '"documents": "files"', "must be 'none'"),
        ('"symbols": [', '"symbols": [1, ', "the symbols are missing"),
    ],
)
def test_a_damaged_file(old: str, new: str, reason: str) -> None:
    text = SymbolVocabulary(**ENDED).to_json()
    assert old in text
    with pytest.raises(DataError, match=reason):
        vocabulary_from_json(text.replace(old, new))
