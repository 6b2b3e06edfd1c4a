"""Vocabularies of language models: what goes in comes out, ids are in the order that is promised, files are checked."""

import gzip
import json
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.errors import ConfigError, DataError
from manyheads.text.of_folder import (
    PieceVocabulary,
    learn_vocabulary,
    load_tokenizer,
    load_vocabulary,
    vocabulary_from_json,
)
from manyheads.text.settings import TokenizerSettings, VocabularySettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary, Vocabulary
from manyheads.text.word_vocabulary import WordVocabulary

LINES = ["the cat sees the dog", "the <unk> sees a cat , a dog", "", "übermäßig 1234 don't  stop"]
EVERY = [
    VocabularySettings(level=level, documents=documents)  # type: ignore[arg-type]
    for level in ("bytes", "bpe", "words")
    for documents in ("none", "files", "lines")
]
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def learn(options: VocabularySettings, lines: list[str] = LINES) -> Vocabulary:
    return learn_vocabulary(iter(lines), options)


@pytest.fixture(scope="module")
def pieces() -> PieceVocabulary:
    made = learn(VocabularySettings(level="bpe"))
    assert isinstance(made, PieceVocabulary)
    return made


@given(raw=st.binary(max_size=40))
def test_bytes_come_back_bit_for_bit(raw: bytes) -> None:
    for documents in ("none", "files"):
        vocabulary = ByteVocabulary(documents)  # type: ignore[arg-type]
        assert vocabulary.decode_bytes(list(raw)) == raw
        assert vocabulary.decode(list(raw)) == raw.decode("utf-8", "replace")


@settings(deadline=None)
@given(text=TEXT)
def test_bytes_of_text(text: str) -> None:
    vocabulary = ByteVocabulary()
    assert vocabulary.encode(text) == list(text.encode())
    assert vocabulary.decode(vocabulary.encode(text)) == text
    lines = ByteVocabulary("lines")
    assert lines.decode(lines.encode(text)) == text
    assert lines.encode("a\nb") == [97, 256, 98]


@settings(deadline=None)
@given(text=TEXT)
def test_pieces_of_text(pieces: PieceVocabulary, text: str) -> None:
    ids = pieces.encode(text)
    assert pieces.decode(ids) == unicodedata.normalize("NFC", text)
    assert ids.count(pieces.line_id) == text.count("\n")
    if "\n" not in text:
        assert pieces.decode(ids) == pieces.tokenizer.decode(ids)
        assert ids == pieces.tokenizer.encode(text)


@settings(deadline=None)
@given(data=st.data())
def test_whatever_a_model_writes_can_be_shown_token_by_token(data: st.DataObject) -> None:
    vocabulary = learn(data.draw(st.sampled_from(EVERY)))
    ids = data.draw(st.lists(st.integers(0, vocabulary.vocab_size - 1), max_size=12))
    shown = b"".join(vocabulary.continuation(ids[:place], ids[place : place + 1]) for place in range(len(ids)))
    assert shown == vocabulary.decode_bytes(ids)
    place = data.draw(st.integers(0, len(ids)))
    assert vocabulary.decode_bytes(ids[:place]) + vocabulary.continuation(ids[:place], ids[place:]) == shown
    assert len(vocabulary.tokens(ids)) == len(ids)
    assert not any("\n" in token for token in vocabulary.tokens(ids))


def test_a_space_after_a_special_id_is_shown() -> None:
    vocabulary = learn(VocabularySettings(level="bpe"))
    words = [index for index in range(vocabulary.vocab_size) if vocabulary.tokens([index])[0].startswith("▁t")]
    silent = next(
        index
        for index in range(vocabulary.vocab_size)
        if vocabulary.decode_bytes([words[0], index, words[0]]) == vocabulary.decode_bytes([words[0], words[0]])
    )
    shown = vocabulary.continuation([words[0], silent], [words[0]])
    assert shown.startswith(b" t")


def test_words_are_in_the_order_of_their_frequency() -> None:
    vocabulary = learn(VocabularySettings(level="words"))
    assert isinstance(vocabulary, WordVocabulary)
    words = vocabulary.tokens(range(vocabulary.vocab_size))
    counts = Counter(word for line in LINES for word in line.split())
    # as `Counter.most_common` has them: of equal words the first to appear is first
    assert words == ["<eos>", *(word for word, _ in counts.most_common())]
    assert vocabulary.encode("the <unk> zebra\n\n <eos> a\n") == [
        *(words.index(word) for word in ("the", "<unk>", "<unk>")),
        0,
        0,
        *(words.index(word) for word in ("<unk>", "a")),
        0,
    ]
    assert vocabulary.decode(vocabulary.encode(" the  dog \nsees zebras\n")) == "the dog\nsees <unk>\n"


def test_words_that_do_not_fit_count_as_unknown() -> None:
    few = learn(VocabularySettings(level="words", vocab_size=5))
    assert few.tokens(range(few.vocab_size)) == ["<eos>", "<unk>", "the", "cat", "sees"]
    often = learn(VocabularySettings(level="words", min_count=2))
    assert often.tokens(range(often.vocab_size)) == ["<eos>", "<unk>", "the", "cat", "sees", "dog", "a"]
    none_unknown = learn(VocabularySettings(level="words"), ["b a", "A"])
    assert none_unknown.tokens(range(none_unknown.vocab_size)) == ["<eos>", "b", "a", "A", "<unk>"]
    folded = learn(VocabularySettings(level="words", lowercase=True), ["b a", "A"])
    assert folded.tokens(range(folded.vocab_size)) == ["<eos>", "a", "b", "<unk>"]
    assert folded.encode("A B") == [1, 2]


def test_white_space_is_ascii_alone() -> None:
    vocabulary = learn(VocabularySettings(level="words"), ["a\u00a0b\tc\u2028 \x1cd\r"])
    assert vocabulary.tokens(range(1, vocabulary.vocab_size)) == ["a\u00a0b", "c\u2028", "\x1cd", "<unk>"]
    assert vocabulary.encode("\x1cd a\u00a0b\rc\u2028") == [3, 1, 2]


def test_ends_of_documents() -> None:
    ends = {options: learn(options) for options in EVERY}
    for options, vocabulary in ends.items():
        assert (vocabulary.end_id is None) == (options.documents == "none")
        assert (vocabulary.end_id == vocabulary.line_id) == (options.documents == "lines")
        assert vocabulary.start_id == (vocabulary.line_id if vocabulary.end_id is None else vocabulary.end_id)
        assert vocabulary.decode([vocabulary.line_id]) == "\n"
        if options.documents == "files":
            assert vocabulary.decode([vocabulary.end_id or 0]) == ""
            assert vocabulary.end_id not in vocabulary.encode("a </s> <eod> \x00 <eos>\n")
    sizes = [ends[options].vocab_size for options in EVERY if options.level == "bytes"]
    assert sizes == [256, 257, 257]
    billion = learn(VocabularySettings(level="words", documents="lines", line_end="<S>"), ["a b", "<S> a"])
    assert billion.tokens(range(billion.vocab_size)) == ["<S>", "a", "b", "<unk>"]
    assert (billion.end_id, billion.start_id) == (0, 0)
    assert billion.encode("<S>") == [billion.unk_id]


@pytest.mark.parametrize("options", EVERY, ids=lambda options: f"{options.level}-{options.documents}")
def test_files_hold_all_of_it(tmp_path: Path, options: VocabularySettings) -> None:
    vocabulary = learn(options)
    vocabulary.save(tmp_path / "tokenizer.json")
    assert vocabulary.files() == {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_vocabulary(place)
        assert type(again) is type(vocabulary)
        assert (again.digest, again.documents, again.describe()) == (
            vocabulary.digest,
            vocabulary.documents,
            vocabulary.describe(),
        )
    assert learn(options).digest == vocabulary.digest
    with pytest.raises(DataError, match="vocabulary of a language model"):
        load_tokenizer(tmp_path)


def test_damaged_files_are_refused(pieces: PieceVocabulary) -> None:
    words = json.loads(WordVocabulary(["<eos>", "a", "<unk>"]).to_json())
    inner = json.loads(pieces.to_json())
    cases: list[tuple[object, str]] = [
        ([], "not the vocabulary"),
        ({**words, "format": "else"}, "not the vocabulary"),
        ({**words, "format_version": 2}, "Update manyheads"),
        ({**words, "format_version": True}, "Update manyheads"),
        ({**words, "level": "chars"}, "level is 'chars'"),
        ({**words, "level": ["words"]}, "level is"),
        ({**words, "documents": "some"}, "documents is 'some'"),
        ({**words, "documents": "files"}, "<eod>"),
        ({**words, "words": ["<eos>", "a"]}, "<unk>"),
        ({**words, "words": ["<unk>", "a"]}, "<unk>"),
        ({**words, "words": ["<eos>", "a", "a", "<unk>"]}, "once"),
        ({**words, "words": ["<eos>", "a b", "<unk>"]}, "is not a word"),
        ({**words, "words": ["<eos>", "", "<unk>"]}, "is not a word"),
        ({**words, "words": ["<eos>", 3, "<unk>"]}, "not text"),
        ({**words, "words": []}, "missing"),
        ({**words, "lowercase": 1}, "lowercase is 1"),
        ({**words, "else": 1}, "changed or damaged"),
        ({**inner, "tokenizer": {}}, "not a tokenizer"),
        ({**inner, "tokenizer": json.loads(Tokenizer.train(["a"], _word()).to_json())}, "word tokenizer"),
    ]
    for content, message in cases:
        with pytest.raises(DataError, match=message):
            vocabulary_from_json(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    with pytest.raises(DataError, match="valid JSON"):
        vocabulary_from_json("{")
    with pytest.raises(DataError, match="surrogate"):
        vocabulary_from_json(json.dumps({**words, "words": ["<eos>", "\ud800", "<unk>"]}))


def _word() -> TokenizerSettings:
    return TokenizerSettings(kind="word", vocab_size=8)


def test_ids_and_texts_that_cannot_be(pieces: PieceVocabulary) -> None:
    for vocabulary in (ByteVocabulary(), learn(VocabularySettings(level="words")), pieces):
        for ids in ([-1], [0, vocabulary.vocab_size]):
            with pytest.raises(DataError, match="outside the vocabulary"):
                vocabulary.decode(ids)
            with pytest.raises(DataError, match="outside the vocabulary"):
                vocabulary.tokens(ids)
        with pytest.raises(DataError, match="surrogate"):
            vocabulary.encode("a\ud800")
    for level in ("bpe", "words"):
        with pytest.raises(DataError, match="every line is empty"):
            learn(VocabularySettings(level=level), ["", " "])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 300}, "exactly 256 bytes"),
        ({"level": "bpe", "vocab_size": 100}, "at least 300"),
        ({"level": "words", "vocab_size": 2}, "at least 4"),
        ({"level": "words", "min_count": 0}, "at least 1"),
        ({"level": "bpe", "min_count": 2}, "with level bpe it must be 1"),
        ({"lowercase": True}, "bytes are read without changes"),
        ({"level": "words", "line_end": "a b"}, "one word"),
        ({"level": "words", "line_end": "<unk>"}, "one word"),
    ],
)
def test_settings_that_contradict_each_other(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VocabularySettings(**options)  # type: ignore[arg-type]


def test_long_lines_teach_all_of_themselves() -> None:
    line = "abcd " * 4000 + "wxyz " * 4000
    vocabulary = learn(VocabularySettings(level="bpe", vocab_size=300), [line])
    assert {" abcd", " wxyz"} <= set(vocabulary.tokenizer.pieces)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("taught", "size"), [("valid", 13_777), pytest.param("train", 33_278, marks=pytest.mark.slow)])
def test_wikitext_2_has_the_published_counts(taught: str, size: int, shared: Path) -> None:
    wanted = {"valid": 217_646, "test": 245_569} | ({"train": 2_088_628} if taught == "train" else {})
    lines = {}
    for split in wanted:
        text = gzip.decompress((shared / "data" / "wikitext-2" / f"{split}.txt.gz").read_bytes()).decode()
        lines[split] = text.removesuffix("\n").split("\n")
    vocabulary = learn(VocabularySettings(level="words"), lines[taught])
    assert vocabulary.vocab_size == size
    counts = {split: sum(len(ids) + 1 for ids in vocabulary.encode_lines(known)) for split, known in lines.items()}
    assert counts == wanted
