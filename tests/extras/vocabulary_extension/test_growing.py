"""A tokenizer that learns more pieces keeps its ids and needs fewer tokens."""

import random
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.trainers import BpeTrainer

from manyheads.errors import ConfigError, DataError
from manyheads.extras.vocabulary_extension.growth import Growth, grow, old_ids_of
from manyheads.text.of_folder import PieceVocabulary
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary

OLD = ["The cat sat on the mat.", "A man reads the old book.", "The dog and the cat eat."] * 20
_RANDOM = random.Random(1)
_STEMS = ["Haus", "Garten", "Sommer", "Winter", "Freund", "Schule", "Wasser", "Straße"]
NEW = [
    " ".join(f"{_RANDOM.choice(_STEMS)}{_RANDOM.choice(['', 'en', 'chen', 'liche'])}" for _ in range(6))
    for _ in range(300)
]


def trained(texts: list[str], kind: str = "bpe", size: int = 340) -> Tokenizer:
    return Tokenizer.train(texts, TokenizerSettings(kind=kind, vocab_size=size))  # type: ignore[arg-type]


def ends(tokenizer: Tokenizer, ids: list[int]) -> set[int]:
    """The bytes at which tokens end."""
    first = tokenizer.unk_id + 1
    lengths = (
        1 if index < first + 256 else len(piece.encode()) for index in ids for piece in [tokenizer.pieces[index]]
    )
    return set(accumulate(lengths))


@pytest.fixture(scope="module")
def old() -> Tokenizer:
    return trained(OLD)


@pytest.fixture(scope="module")
def grown(old: Tokenizer) -> Tokenizer:
    return grow(old, NEW, 60)


def test_all_ids_stay_and_texts_return(old: Tokenizer, grown: Tokenizer) -> None:
    assert grown.vocab_size == old.vocab_size + 60
    assert grown.pieces[: old.vocab_size] == old.pieces
    for text in (*NEW[:20], *OLD[:3], "Ein ganz anderer Text: 12 345, „ö“ und 漢字."):
        assert grown.decode(grown.encode(text)) == text
    assert Tokenizer.from_json(grown.to_json()).digest == grown.digest


def test_new_tokens_join_old_ones(old: Tokenizer, grown: Tokenizer) -> None:
    before, after = old.encode_batch(NEW), grown.encode_batch(NEW)
    for one, other in zip(before, after, strict=True):
        assert ends(grown, other) < ends(old, one)
    assert sum(map(len, after)) < 0.4 * sum(map(len, before))


def test_the_ids_that_a_new_one_replaces(old: Tokenizer, grown: Tokenizer) -> None:
    found = old_ids_of(grown, old.vocab_size)
    assert len(found) == 60
    for index, ids in enumerate(found, old.vocab_size):
        assert all(one < old.vocab_size for one in ids)
        spelled = b"".join(bytes([one - 4]) if one < 260 else old.pieces[one].encode() for one in ids)
        assert spelled.decode() == grown.pieces[index]
    assert max(map(len, found)) > 2


def test_frequent_characters_get_pieces_and_rare_ones_do_not(old: Tokenizer) -> None:
    texts = ["мама мыла раму"] * 3000 + ["漢"] * 3
    grown = grow(old, texts, 40)
    assert {"м", "а", "ы"} < set(grown.pieces)
    assert "漢" not in grown.pieces
    assert not any("<0x" in piece for piece in grown.pieces[old.vocab_size :])  # bytes are not joined
    assert grown.encode("мама")[0] >= old.vocab_size
    assert grown.decode(grown.encode(texts[-1])) == texts[-1]


def test_growth_is_reproducible_and_may_end_early(old: Tokenizer, grown: Tokenizer) -> None:
    assert grow(old, list(NEW), 60).to_json() == grown.to_json()
    assert grow(old, OLD, 5000).vocab_size < old.vocab_size + 100
    few = grow(old, NEW, 1)
    assert few.vocab_size == old.vocab_size + 1
    twice = grow(grown, OLD + NEW, 10)
    assert twice.pieces[: grown.vocab_size] == grown.pieces


def test_few_new_pieces_take_few_merges(old: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as many as the tokenizer has pieces."""
    sizes: list[int] = []

    def trainer(vocab_size: int, **options: Any) -> Any:
        sizes.append(vocab_size)
        return BpeTrainer(vocab_size=vocab_size, **options)

    monkeypatch.setattr("manyheads.extras.vocabulary_extension.growth.trainers", SimpleNamespace(BpeTrainer=trainer))
    grow(old, NEW, 1)
    assert len(sizes) == 1
    assert sizes[0] < old.vocab_size - 100


def test_a_vocabulary_of_words_gets_the_most_frequent_unknown_ones() -> None:
    old = trained(["a b c"], "word", 16)
    grown = grow(old, ["b d d e e e f", "<s> <unk>"], 2)
    assert grown.tokens(range(old.vocab_size, grown.vocab_size)) == ["e", "d"]
    assert old_ids_of(grown, old.vocab_size) == [[], []]


def test_the_vocabulary_of_a_language_model_grows(old: Tokenizer) -> None:
    before = PieceVocabulary(old, "lines")
    after = Growth(before, 20).learn(NEW)
    assert isinstance(after, PieceVocabulary)
    assert (after.documents, after.vocab_size) == ("lines", before.vocab_size + 20)
    assert old_ids_of(after, before.vocab_size) == old_ids_of(after.tokenizer, old.vocab_size)


def test_a_lowercase_tokenizer_stays_one() -> None:
    old = Tokenizer.train(OLD, TokenizerSettings(vocab_size=340, lowercase=True))
    grown = grow(old, NEW, 30)
    assert grown.lowercase
    assert not any(piece != piece.lower() for piece in grown.pieces[old.vocab_size :])


@pytest.mark.parametrize(
    ("known", "count", "message"),
    [
        (trained(OLD), 0, "--new-pieces is 0"),
        (trained(OLD, "unigram"), 5, "kind unigram cannot grow"),
        (ByteVocabulary("none"), 5, "vocabulary of bytes cannot grow"),
        (Tokenizer.train(OLD, TokenizerSettings(vocab_size=340), languages=["de", "fr"]), 5, "tags of languages"),
        (Tokenizer.train(OLD, TokenizerSettings(vocab_size=340), symbols=["(S", ")S"]), 5, "brackets of trees"),
    ],
)
def test_what_cannot_grow_is_refused(known: Any, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Growth(known, count)


def test_empty_text_is_refused(old: Tokenizer) -> None:
    with pytest.raises(DataError, match="every line is empty"):
        grow(old, ["", " "], 5)
