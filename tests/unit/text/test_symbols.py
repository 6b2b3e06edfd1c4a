"""Symbols of a tokenizer: one id each on the target side, nothing on the source side."""

import json

import pytest

from manyheads.errors import ConfigError, DataError
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

SENTENCES = ["The NN cat sat on the NN mat NN .", "A NN dog NN and a ( NN ) cat ."] * 10
SYMBOLS = ("(S", ")S", "NN", "XX")


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.train(SENTENCES, TokenizerSettings(kind=request.param, vocab_size=320), symbols=SYMBOLS)


def test_targets_are_symbols_and_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_targets(["(S XX NN )S", "", "(S é XX"])
    assert [len(row) for row in ids] == [4, 0, 1 + 3 + 1]
    assert all(3 < index < tokenizer.num_target_ids == 264 for row in ids for index in row)
    assert tokenizer.decode_batch([[1, *row, 2, 0] for row in ids]) == ["(S XX NN )S", "", "(S é XX"]
    assert tokenizer.symbols == SYMBOLS


def test_sentences_come_back_and_keep_their_own_pieces(tokenizer: Tokenizer) -> None:
    for text in [*SENTENCES[:2], "(S XX )S", "</s> <pad>", " two  spaces "]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        brackets = {tokenizer.encode_targets([symbol])[0][0] for symbol in ("(S", ")S")}
        assert not brackets & set(ids)


def test_saved_and_read(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_json(tokenizer.to_json())
    assert (again.digest, again.symbols) == (tokenizer.digest, SYMBOLS)
    content = json.loads(tokenizer.to_json())
    for damage in (content["added_tokens"][1:], [], None, content["added_tokens"] * 99):
        with pytest.raises(DataError):
            Tokenizer.from_json(json.dumps(content | {"added_tokens": damage}))


def test_words() -> None:
    tokenizer = Tokenizer.train(SENTENCES, TokenizerSettings(kind="word", vocab_size=20), symbols=SYMBOLS)
    assert tokenizer.encode_targets(["(S cat )S"]) == [[4, 3, 5]]
    assert tokenizer.decode(tokenizer.encode("The cat (S")) == "The cat (S"


def test_without_symbols_targets_are_texts() -> None:
    tokenizer = Tokenizer.train(SENTENCES, TokenizerSettings(vocab_size=320))
    assert tokenizer.encode_targets(SENTENCES) == tokenizer.encode_batch(SENTENCES)
    assert tokenizer.num_target_ids == tokenizer.vocab_size
    assert tokenizer.symbols == ()


def test_mistakes() -> None:
    for symbols in (("a b",), ("",), ("x", "x"), ("<s>",), ("\ud800",)):
        with pytest.raises(DataError):
            Tokenizer.train(SENTENCES, TokenizerSettings(vocab_size=320), symbols=symbols)
    with pytest.raises(ConfigError, match="symbols of the target side"):
        Tokenizer.train(SENTENCES, TokenizerSettings(vocab_size=300), symbols=[f"({n}" for n in range(40)])
