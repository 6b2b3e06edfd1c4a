"""What is learned from a text, and in which order."""

import unicodedata
from collections import Counter
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from manyheads.text import learning
from manyheads.text.learning import WordCounts, thinned
from manyheads.text.pipeline import WORD_PATTERN
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

SPECIAL = ["<pad> <s> </s> <unk> <0x41>", "a <s>b</s> c", "The cat sat on the mat."] * 3


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
def test_names_of_special_tokens_in_a_text_are_text(kind: str) -> None:
    """A corpus of web pages or of model output holds them; no piece may be spelled like one."""
    tokenizer = Tokenizer.train(SPECIAL, TokenizerSettings(kind=kind, vocab_size=400))  # type: ignore[arg-type]
    assert Tokenizer.from_json(tokenizer.to_json()).digest == tokenizer.digest
    for text in SPECIAL[:3]:
        ids = tokenizer.encode(text)
        assert min(ids) >= tokenizer.unk_id
        assert kind == "word" or tokenizer.decode(ids) == text


def test_words_that_are_equally_frequent_stand_in_the_order_of_their_characters() -> None:
    tokenizer = Tokenizer.train(["zeta beta", "alpha beta"], TokenizerSettings(kind="word", vocab_size=8))
    assert tokenizer.tokens(range(4, tokenizer.vocab_size)) == ["beta", "alpha", "zeta"]
    smaller = ["e d c b a"]  # of which four fit
    tokenizer = Tokenizer.train(smaller, TokenizerSettings(kind="word", vocab_size=8))
    assert tokenizer.tokens(range(4, tokenizer.vocab_size)) == ["a", "b", "c", "d"]


ODD_SPACES = [
    "a  b", "  x y ", "\t a \tb c\t", "a\xa0 \tb c", "☃ ☃☃ ☃ b", "Привет мир", "e\u0301a \u0301b", "{ } ~ ~ {",
    "a\x1c b", "", " ", "don't stop", "a plain line of words, and a plain line again",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["bpe", "word", "unigram"])
@pytest.mark.parametrize("rare", [set(), {"☃"}, {"~", "{", "á"}, {"П", "м"}])
def test_counts_by_part_are_those_of_whole_texts(kind: str, rare: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where white space of several kinds meets, and where rare characters leave several spaces in a row."""
    monkeypatch.setattr(learning, "MAX_PARTS", 3)
    texts = ODD_SPACES * 3
    counts = WordCounts(texts, kind, True, lambda *phase: None)
    plain = [unicodedata.normalize("NFC", text).lower() for text in texts]
    assert +counts.chars == Counter("".join(plain))
    counts.without(rare)
    space = "" if kind == "word" else " "
    split: Any = pre_tokenizers.WhitespaceSplit()
    if kind != "word":
        split = pre_tokenizers.Split(tokenizers.Regex(WORD_PATTERN), "isolated")
    table = dict.fromkeys(map(ord, rare), " ")
    whole = [space + text.translate(table) if text else "" for text in plain]
    assert counts.words == Counter(word for text in whole for word, _ in split.pre_tokenize_str(text))


def test_large_samples_are_bounded_in_number_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "MAX_SAMPLE", 8)
    monkeypatch.setattr(learning, "MAX_SAMPLE_BYTES", 100)
    assert list(thinned(range(8), 8, 100)) == [*range(8)]
    assert list(thinned(range(9), 9, 100)) == [0, 2, 4, 6, 8]
    assert list(thinned(range(8), 8, 401)) == [0, 4]
