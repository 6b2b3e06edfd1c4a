"""The tokenizer: lossless, deterministic, nothing unknown, and safe against damaged files."""

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from manyheads.errors import ConfigError, DataError, SaveError
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

SENTENCES = [
    "The cat sat on the mat.",
    "Die Katze saß auf der Matte.",
    "Don't worry, it's 12 o'clock — 1,234.50 € is enough!",
    "Über allen Gipfeln ist Ruh'.",
    "Tom said that Tom did not know what Tom wanted.",
    "Tom sagte, dass Tom nicht wusste, was Tom wollte.",
] * 20
NORMAL_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=60).map(
    lambda text: unicodedata.normalize("NFC", text)
)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.train(SENTENCES, TokenizerSettings(kind=request.param, vocab_size=400))


@settings(deadline=None, max_examples=80)
@given(text=NORMAL_TEXT)
def test_every_nfc_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(index > tokenizer.unk_id for index in ids), "nothing is unknown, and no special id appears"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces ",
        "a\tb\nc\r",
        "\x00",
        "a\u2028b\x85c",
        "▁ is a sign",
        "<s> </s> <unk> <0x41>",
        "🎉 日本語",
        "x" * 5000,
    ],
)
def test_odd_texts_come_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_is_made_nfc(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("u\u0308ber")) == "über"


def test_a_space_before_the_first_word_makes_it_the_same_piece_everywhere(tokenizer: Tokenizer) -> None:
    once, twice = tokenizer.encode("Tom"), tokenizer.encode("Tom Tom")
    assert twice == once + once


def test_batch_equals_one_by_one(tokenizer: Tokenizer) -> None:
    batch = tokenizer.encode_batch(SENTENCES)
    assert batch == [tokenizer.encode(text) for text in SENTENCES]
    assert tokenizer.decode_batch(batch) == SENTENCES
    assert tokenizer.encode_batch([]) == []


ODD_PARTS = [
    *(" ", "  ", "\t", "\u00a0", "\u2028", "\x1c", "\x85", "\u202f!", "\u2800", "\ufeff", "\u200d", "\u034f", "\ufe0f"),
    *(
        "\u0301",
        "\u1161",
        "가",
        "Σ",
        "İ",
        "Tom",
        "Tom ",
        " said",
        "o'clock",
        "1234",
        "</s>",
        ">>de<< ",
        "#x",
        "ไทย",
        "\0",
    ),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("normalize_spaces", [False, True])
def test_many_texts_have_the_ids_of_each(kind, lowercase, normalize_spaces, monkeypatch):
    monkeypatch.setattr("manyheads.text.tokenizer.MAX_CHARS_AT_ONCE", 40)
    monkeypatch.setattr("manyheads.text.tokenizer.MOST_KNOWN_CHARS", 200)
    options = TokenizerSettings(kind=kind, vocab_size=400, lowercase=lowercase, normalize_spaces=normalize_spaces)  # type: ignore[arg-type]
    plain, tagged = (Tokenizer.train(SENTENCES[:6] * 4, options, languages=names) for names in ((), ("de", "fr")))
    sides = [plain, plain.source, plain.target, tagged.target]
    sides.append(Tokenizer.train(SENTENCES, options, symbols=["#x", "Tom"]).target)

    @settings(deadline=None, max_examples=40)
    @given(texts=st.lists(st.lists(st.sampled_from(ODD_PARTS), max_size=12).map("".join), max_size=12))
    def check(texts: list[str]) -> None:
        for side in sides:
            assert _rows(*side.encode_many(texts)) == side.encode_batch(texts)
        named = [f">>{'fr' if 'o' in text else 'de'}<< {text}" for text in texts]
        assert _rows(*tagged.source.encode_many(named)) == tagged.source.encode_batch(named)

    check()


def _rows(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> list[list[int]]:
    assert len(ids) == lengths.sum()
    return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []


def test_decode_leaves_special_ids_out_and_mends_broken_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Katze")
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == "Katze"
    assert tokenizer.decode([4 + 0xE2]) == "\ufffd"


@pytest.mark.parametrize("wrong", [-1, 400, 10**12])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, wrong: int) -> None:
    with pytest.raises(DataError, match=f"Id {wrong} is outside the vocabulary"):
        tokenizer.decode([5, wrong])
    with pytest.raises(DataError, match="outside"):
        tokenizer.tokens([wrong])


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"Text 1 .*U\+D800.* character 2"):
        tokenizer.encode_batch(["fine", "ab\ud800"])
    with pytest.raises(DataError, match="surrogate"):
        Tokenizer.train(["ab\ud800"], TokenizerSettings(vocab_size=400))


def test_tokens_are_readable(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.tokens([*tokenizer.encode("The 日"), tokenizer.eos_id])
    assert "".join(pieces[:-4]).startswith("▁The")
    assert pieces[-4:] == ["<0xE6>", "<0x97>", "<0xA5>", "</s>"]


def test_lowercase_survives_the_file(tmp_path: Path) -> None:
    folded = Tokenizer.train(SENTENCES, TokenizerSettings(vocab_size=400, lowercase=True))
    folded.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.lowercase
    assert loaded.decode(loaded.encode("The ÄRGER")) == "the ärger"
    assert loaded.digest == folded.digest
    assert (tmp_path / "tokenizer.json").read_bytes() == folded.to_json().encode()


def test_trained_anywhere_the_bytes_are_the_same() -> None:
    kinds: tuple[Any, ...] = ("bpe", "unigram", "word")
    program = (
        "import sys, json\n"
        "from manyheads.text.settings import TokenizerSettings\n"
        "from manyheads.text.tokenizer import Tokenizer\n"
        "texts = json.loads(sys.stdin.read())\n"
        f"for kind in {kinds!r}:\n"
        "    print(Tokenizer.train(texts, TokenizerSettings(kind=kind, vocab_size=420)).digest)"
    )
    texts = SENTENCES + [f"Satz {number} mit Wort{number % 37} und word{number % 53}" for number in range(500)]
    here = [Tokenizer.train(texts, TokenizerSettings(kind=kind, vocab_size=420)).digest for kind in kinds]
    for threads, hash_seed in (("1", "1"), ("3", "3")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(texts),
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.split() == here


def test_vocabulary_is_at_most_what_was_asked(tokenizer: Tokenizer) -> None:
    assert 300 < tokenizer.vocab_size <= 400
    tiny = Tokenizer.train(["ab ab"], TokenizerSettings(vocab_size=8000))
    assert 260 < tiny.vocab_size < 270
    with pytest.raises(ConfigError, match="vocab_size"):
        TokenizerSettings(vocab_size=100)


def test_rare_characters_are_spelled_in_bytes() -> None:
    tokenizer = Tokenizer.train(["abc abd " * 50] * 100 + ["日"], TokenizerSettings(vocab_size=400))
    assert tokenizer.tokens(tokenizer.encode("日")) == ["▁", "<0xE6>", "<0x97>", "<0xA5>"]


def test_nothing_to_learn_from_is_an_error() -> None:
    with pytest.raises(DataError, match="every line is empty"):
        Tokenizer.train(["", "  "], TokenizerSettings())


def test_words() -> None:
    tokenizer = Tokenizer.train(["b a a", "c a b"], TokenizerSettings(kind="word", vocab_size=8))
    assert tokenizer.encode("a b c") == [4, 5, 6]
    assert tokenizer.decode([1, 4, 5, 2]) == "a b"
    assert tokenizer.encode("never </s> <s>") == [tokenizer.unk_id] * 3
    assert tokenizer.tokens([3, 4]) == ["<unk>", "a"]


def damage(data: dict, what: str) -> object:
    """One hostile or broken variant of a tokenizer's content."""
    model = data["model"]
    pieces = model["vocab"]
    if what == "a list":
        return [data]
    if what == "no model":
        del data["model"]
    elif what == "unknown type":
        model["type"] = "WordPiece"
    elif what == "specials swapped":
        pieces["<s>"], pieces["</s>"] = pieces["</s>"], pieces["<s>"]
    elif what == "special missing":
        pieces["<eos>"] = pieces.pop("</s>")
    elif what == "huge id":
        pieces["zzz"] = 10**15
    elif what == "id not a number":
        pieces["zzz"] = "7"
    elif what == "no vocabulary":
        del model["vocab"]
    elif what == "surrogate":
        pieces["\ud800"] = len(pieces)
    elif what == "bad merge":
        model["merges"].append(["q", "nowhere"])
    elif what == "merge of numbers":
        model["merges"].append([1, 2])
    elif what == "no merges":
        del model["merges"]
    elif what == "evil pattern":
        data["pre_tokenizer"]["pattern"]["Regex"] = "(a+)+$"
    elif what == "extra key":
        data["__class__"] = "os.system"
    elif what == "other normalizer":
        data["normalizer"] = None
    return data


DAMAGES = [
    "a list", "no model", "unknown type", "specials swapped", "special missing", "huge id", "id not a number",
    "no vocabulary", "surrogate", "bad merge", "merge of numbers", "no merges", "evil pattern", "extra key",
    "other normalizer",
]  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_files_are_refused(tmp_path: Path, what: str) -> None:
    data = json.loads(Tokenizer.train(SENTENCES, TokenizerSettings(vocab_size=400)).to_json())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(damage(data, what)))
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "1", None, True])
def test_damaged_scores_are_refused(score: object) -> None:
    data = json.loads(Tokenizer.train(SENTENCES, TokenizerSettings(kind="unigram", vocab_size=400)).to_json())
    data["model"]["vocab"][300][1] = score
    with pytest.raises(DataError, match="entry 300"):
        Tokenizer.from_json(json.dumps(data))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 200_000, b"1" * 10_000, b"null", b'{"model": 3}'])
def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError):
        Tokenizer.load(path)


def test_missing_file_and_folder_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(DataError, match="Cannot read"):
            Tokenizer.load(path)
    with pytest.raises(SaveError, match="Cannot save"):
        Tokenizer.train(SENTENCES, TokenizerSettings(vocab_size=400)).save(tmp_path)
    monkeypatch.setattr("manyheads.text.pipeline.MAX_FILE_BYTES", 10)
    (tmp_path / "large.json").write_text(" " * 11)
    with pytest.raises(DataError, match="at most 10"):
        Tokenizer.load(tmp_path / "large.json")
