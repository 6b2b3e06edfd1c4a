"""Features of words."""

from manyheads.extras.parsing.span_data import MOST_HASHES, MOST_PIECES, affix_hashes, word_pieces
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer


def same(one: str, other: str) -> list[int]:
    """The places of equal hashes."""
    return [
        place
        for place, pair in enumerate(zip(affix_hashes(one), affix_hashes(other), strict=True))
        if len({*pair}) == 1
    ]


def test_hashes_do_not_depend_on_the_process() -> None:
    assert affix_hashes("Running")[:3] == affix_hashes("running")[:3]
    assert affix_hashes("a") == [48475, 0, 0, 0, 0, 0, 0, 0, affix_hashes("b")[8], affix_hashes("b")[9]]


def test_endings_beginnings_and_shape() -> None:
    assert same("walking", "talking") == [1, 2, 3, 4, 8, 9]
    assert same("undo", "unite") == [5, 6, 8, 9]
    assert same("London", "Paris") == [8, 9]
    assert same("19995", "42031") == [8, 9]
    assert 8 not in same("U.S.", "US")


def test_all_words_have_the_same_number_of_hashes() -> None:
    for word in ("a", "antidisestablishmentarianism", "é", "\ud800", "-LRB-"):
        hashes = affix_hashes(word)
        assert len(hashes) == MOST_HASHES
        assert all(0 <= value < 2**16 for value in hashes)


def test_pieces_of_long_words_are_those_of_both_ends() -> None:
    tokenizer = Tokenizer.train(["a b c d"], TokenizerSettings(vocab_size=300))
    [pieces, short] = word_pieces(["abcdefghijklmnop", "a"], tokenizer)
    whole = tokenizer.encode("abcdefghijklmnop")
    assert len(pieces) == MOST_PIECES < len(whole)
    assert pieces == whole[:4] + whole[-4:]
    assert short == tokenizer.encode("a")
