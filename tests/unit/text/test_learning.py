"""What is learned from a text, and in which order."""

from __future__ import annotations

import pytest

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
