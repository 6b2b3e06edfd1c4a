"""White space and characters without width: what tokenizers of new preparations read, and what they keep."""

import pytest

from manyheads.extras.vocabulary_extension.growth import grow
from manyheads.text import tokenizer as tokenizer_module
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import is_blank

TEXTS = ["I am very hungry.", "The computer is expensive!", "Oui\u00a0! Non\u00a0; 10\u202f%", "میخواهم क्ष 😊"] * 5
PLAIN = "I am very hungry, computer!"
WHITE = "\t\v\f\x1c\x1f\x85\u00a0\u1680\u2003\u2009\u2028\u2029\u202f\u205f\u3000\u2800\u3164\uffa0\r\n"
NO_WIDTH = (
    "\u00ad\u200b\u2060\ufeff\u200e\u200f\u202a\u202c\u2066\u2069\u061c\u034f\u17b4\u180e"
    "\x00\x1b\x7f\x9f\ufff9\u200c\u200d"
)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.train(TEXTS, TokenizerSettings(kind=request.param, vocab_size=330, normalize_spaces=True))


@pytest.mark.parametrize("white", WHITE, ids=ascii)
def test_white_space_of_any_kind_and_length_is_one_space_in_sources(tokenizer: Tokenizer, white: str) -> None:
    plain = tokenizer.encode(PLAIN)
    assert tokenizer.encode(PLAIN.replace(" ", white)) == plain
    assert tokenizer.encode(white + PLAIN.replace(" ", f" {white} ") + white) == plain


@pytest.mark.parametrize("sign", NO_WIDTH, ids=ascii)
def test_characters_without_width_are_left_out(tokenizer: Tokenizer, sign: str) -> None:
    odd = sign + PLAIN.replace("pu", f"p{sign}u").replace(" ", f" {sign}") + sign
    assert tokenizer.encode(odd) == tokenizer.encode(PLAIN)
    assert tokenizer.target.encode(odd) == tokenizer.encode(PLAIN)


@pytest.mark.parametrize("sign", ["\ufe0f", "\ufe0e\ufe0e", "\U000e0100", "\U000e0041\U000e007f"], ids=ascii)
def test_signs_that_change_pictures_are_nothing_behind_letters(tokenizer: Tokenizer, sign: str) -> None:
    odd = PLAIN.replace(" ", f"{sign} {sign}") + sign
    assert tokenizer.encode(odd) == tokenizer.encode(PLAIN)
    assert tokenizer.target.encode(odd) == tokenizer.encode(PLAIN)


@pytest.mark.parametrize("sign", [*NO_WIDTH, *WHITE, "\ufe0f"], ids=ascii)
def test_a_text_of_such_signs_is_blank(tokenizer: Tokenizer, sign: str) -> None:
    assert is_blank(f"{sign} {sign}")
    assert not is_blank(f"{sign}.")
    assert tokenizer.decode(tokenizer.encode(f"{sign} {sign}")) == ""


@pytest.mark.parametrize(
    "text",
    [
        "👨\u200d👩\u200d👧\u200d👦 ❤\ufe0f 👩🏽\u200d🚀 🏴\U000e0067\U000e007f 1\ufe0f\u20e3",  # emoji
        "می\u200cخواهم",  # Persian prefixes
        "क्\u200dष ക്\u200c",  # half forms
        "“a” „b“ … ． 「x」 l’été",  # marks of other widths stay
        "ᠮᠣᠩᠭᠣᠯ\u200dᠤᠨ",
    ],
)
def test_characters_with_a_meaning_come_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.target.decode(tokenizer.target.encode(text)) == text


def test_no_break_spaces_of_targets_stay(tokenizer: Tokenizer) -> None:
    text = "Oui\u00a0! Non\u00a0; 10\u202f%"
    side = tokenizer.target
    assert side.decode(side.encode(f"\u2009{text}\t")) == text
    assert tokenizer.decode(tokenizer.encode(text)) == "Oui! Non; 10 %"


@pytest.mark.parametrize("space", ["\u00a0", "\u2009", "\u202f"])
def test_a_thin_space_before_a_mark_is_none_in_sources(tokenizer: Tokenizer, space: str) -> None:
    assert tokenizer.encode(f"hungry{space}, computer{space}!") == tokenizer.encode("hungry, computer!")
    assert tokenizer.encode(f"a{space}.b") == tokenizer.encode("a .b")


def test_the_file_records_it(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.normalize_spaces
    assert again.describe()["normalize_spaces"] is True
    assert again.encode("\u00a0a\u00a0 b") == again.encode("a b")
    assert again.target.encode("a\u00a0b") == tokenizer.target.encode("a\u00a0b") != tokenizer.encode("a b")


def test_tokenizers_without_it_keep_every_space() -> None:
    plain = Tokenizer.train(TEXTS, TokenizerSettings(vocab_size=330))
    text = " a\u00a0 b\u200b\tc "
    assert plain.decode(plain.encode(text)) == text
    assert "Replace" not in plain.to_json()


@pytest.mark.parametrize("through", ["source", "target"])
def test_long_texts_are_read_alike(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    side = getattr(tokenizer, through)
    text = "\ufeff" + "hungry\u00a0\t computer\u00ads \u200b" * 20 + "x" * 90
    whole = side.encode(text)
    monkeypatch.setattr(tokenizer_module, "MAX_CHARS_AT_ONCE", 40)
    assert side.decode(side.encode(text)) == side.decode(whole)
    words = "\ufeff" + "hungry\t computer\u00ads \u200b" * 20 + "hungry" + "\t " * 60 + "hungry"
    monkeypatch.undo()
    whole = side.encode(words)
    monkeypatch.setattr(tokenizer_module, "MAX_CHARS_AT_ONCE", 40)
    assert side.encode(words) == whole


def test_a_grown_tokenizer_reads_spaces_as_before(tokenizer: Tokenizer) -> None:
    if tokenizer.kind == "bpe":
        grown = grow(tokenizer, ["zebra\u00a0zebra zebras"] * 5, 8)
        assert grown.normalize_spaces
        assert grown.encode("a\u00a0 b") == grown.encode("a b")


def test_decoded_targets_have_no_halves_of_characters(tokenizer: Tokenizer) -> None:
    whole = tokenizer.target.encode("中 \ufffd x")
    cut = [*tokenizer.target.encode("x"), 4 + 0xE4, 4 + 0xB8, *whole, 4 + 0x80]
    assert tokenizer.decode(cut) == "x\ufffd\ufffd 中 \ufffd x\ufffd"
    assert tokenizer.target.decode(cut) == "x 中 \ufffd x"
