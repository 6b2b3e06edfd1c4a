"""Texts in parts: the same ids where there are spaces, the same text everywhere."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.text import tokenizer as module
from manyheads.text.learning import MAX_LEARNED_CHARS
from manyheads.text.pipeline import grouped, in_parts
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

SENTENCES = ["The cat sat on the mat.", "Don't worry, it's 12 o'clock.", "Über allen Gipfeln ist Ruh'."] * 20
ODD = [
    "",
    " ",
    "  ",
    "a",
    "word",
    "12345",
    "...",
    "'",
    "é",
    "e\u0301",
    "\u0301",
    "\u1100\u1161\u11a8",
    "\u2028",
    "\t",
    "😀",
]
PIECES = st.lists(st.sampled_from(ODD), max_size=40).map("".join)


@pytest.fixture(scope="module", params=["bpe", "unigram", "word"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.train(SENTENCES, TokenizerSettings(kind=request.param, vocab_size=400))


@settings(deadline=None, max_examples=80)
@given(words=st.lists(st.sampled_from([odd for odd in ODD if odd]), min_size=1, max_size=40), most=st.integers(16, 40))
def test_cut_at_spaces_the_ids_are_those_of_the_whole(tokenizer: Tokenizer, words: list[str], most: int) -> None:
    text = " ".join(words)
    whole = tokenizer.encode(text)
    parts = list(in_parts(text, most, through_words=False))
    if all(begins for _, begins in parts):
        assert " ".join(part for part, _ in parts) == text
        assert [index for part, _ in parts for index in tokenizer.encode(part)] == whole


@settings(deadline=None, max_examples=80)
@given(texts=st.lists(PIECES, max_size=6), most=st.integers(1, 30))
def test_every_text_comes_back(tokenizer: Tokenizer, texts: list[str], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CHARS_AT_ONCE", most)
        lists = tokenizer.encode_batch(texts)
    assert len(lists) == len(texts)
    if tokenizer.kind == "word":
        assert lists == tokenizer.encode_batch(texts)
    else:
        # a run of marks longer than a part must be cut somewhere
        found = [unicodedata.normalize("NFC", text) for text in tokenizer.decode_batch(lists)]
        assert found == [unicodedata.normalize("NFC", text) for text in texts]


def test_parts() -> None:
    assert list(in_parts("aa bb cc", 4, through_words=True)) == [("aa", True), ("bb", True), ("cc", True)]
    assert list(in_parts("aaaaaaaa", 5, through_words=True)) == [("aaaaa", True), ("aaa", False)]
    assert list(in_parts("aaaaaaaa bb", 5, through_words=False)) == [("aaaaaaaa", True), ("bb", True)]
    assert list(in_parts("aaaa  bbbb", 5, through_words=False)) == [("aaaa  bbbb", True)]
    assert list(in_parts("aaaae\u0301b", 5, through_words=True)) == [("aaaa", True), ("e\u0301b", False)]
    assert list(grouped(["aa", "b", "cccc", "d"], 3)) == [["aa", "b"], ["cccc"], ["d"]]
    assert list(grouped([], 3)) == []


def test_lower_case_goes_on_within_words(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = Tokenizer.train(SENTENCES, TokenizerSettings(vocab_size=400, lowercase=True))
    monkeypatch.setattr(module, "MAX_CHARS_AT_ONCE", 3)
    assert folded.decode(folded.encode("GIPFELN </s>X")) == "gipfeln </s>x"


def test_the_beginning_of_a_long_text_teaches() -> None:
    long = "Tom " * (MAX_LEARNED_CHARS // 4)
    known = Tokenizer.train([*SENTENCES, long], TokenizerSettings(vocab_size=400))
    assert Tokenizer.train([*SENTENCES, long + "Zyx " * 1000], TokenizerSettings(vocab_size=400)).digest == known.digest
    assert Tokenizer.train([*SENTENCES, long, "Zyx " * 1000], TokenizerSettings(vocab_size=400)).digest != known.digest


def test_a_word_that_is_too_long_to_be_known_is_not_normalised(tokenizer, monkeypatch):
    """Of kind `word`: its ids are the same, but the library sees a short word."""
    texts = [f"cat {word} mat" for word in ("a" * 30_000, "e" + "\u0301" * 30_000, "x\x1c" * 15_000)]
    whole = tokenizer.encode_batch(texts)
    seen: list[int] = []
    ids = module._ids

    def noting(library: object, given: list[str]) -> list[list[int]]:
        seen.extend(map(len, given))
        return ids(library, given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "MAX_CHARS_AT_ONCE", 10_000)
    monkeypatch.setattr(module, "_ids", noting)
    found = tokenizer.encode_batch(texts)
    if tokenizer.kind == "word":
        assert found == whole
        assert max(seen) < 100
    assert max(seen) <= 20_000
