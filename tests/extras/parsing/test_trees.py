"""Bracketed trees: what is read, what is refused with which words, and what comes back."""

import pytest

from manyheads.errors import DataError
from manyheads.extras.parsing.trees import (
    MAX_DEPTH,
    Leaf,
    Node,
    escape,
    format_tree,
    leaves_of,
    parse_tree,
    read_trees,
    unescape,
)

LINE = "(ROOT (S (NP-SBJ (PRP She)) (VP (VBZ sleeps) (-LRB- -LRB-)) (. .)))"


def test_a_tree_on_a_line_and_over_lines() -> None:
    tree = parse_tree(LINE)
    assert format_tree(tree) == LINE
    assert [leaf.word for leaf in leaves_of(tree)] == ["She", "sleeps", "-LRB-", "."]
    spread = ["", "( (S", "    (NP (PRP She))\t(VP (VBZ", "  sleeps))", "    (. .)) ) ( (X (Y z)))", "", "(A (B c))"]
    found = list(read_trees(spread, "f"))
    assert [number for number, _ in found] == [2, 5, 7]
    assert found[0][1].label == ""
    assert format_tree(found[0][1]) == "( (S (NP (PRP She)) (VP (VBZ sleeps)) (. .)))"
    assert found[2][1] == Node("A", (Leaf("B", "c"),))


def test_odd_characters_are_parts_of_words() -> None:
    text = "(S (X a\u00a0b) (Y \u2028) (Z \x1c\x85) (`` ``))"
    assert [leaf.word for leaf in leaves_of(parse_tree(text))] == ["a\u00a0b", "\u2028", "\x1c\x85", "``"]
    assert format_tree(parse_tree(text)) == text


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (
            ["(S (A b))", "(S (A b)", "(S (A b))", "(S (C d))"],
            ["begins in line 2", "a closing bracket is missing", "Line 3 looks like"],
        ),
        (["(S (A b)))"], ["f: line 1", "a closing bracket has no opening bracket", "'(S (A b)))'"]),
        (["(S (A b)", "  (NP ))"], ["line 2 (the tree begins in line 1)", "(NP) is empty"]),
        (["(S (A b) ())"], ["() is empty"]),
        (["(S (A b c))"], ["two words, 'b' and 'c'"]),
        (["(S (A b) c)"], ["'c' has no bracket of its own"]),
        (["(S a (B c))"], ["the word 'a' and another bracket"]),
        (["(S ( (A b)))"], ["inside a tree has no label"]),
        (["x (S (A b))"], ["'x' is outside"]),
        (["(NN dog)"], ["'dog' is not a tree"]),
        (["()"], ["() is empty"]),
        (["(S (A " + "b" * 100 + " c))"], ["bbb…'"]),
        (["(S " * (MAX_DEPTH + 9) + "(A b)" + ")" * (MAX_DEPTH + 9)], ["nested more than"]),
    ],
)
def test_what_is_refused(lines: list[str], messages: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        list(read_trees(lines, "f"))
    for message in messages:
        assert message in str(caught.value)


def test_one_tree_is_one_tree() -> None:
    for text, count in (("", 0), ("  ", 0), (LINE + LINE, 2)):
        with pytest.raises(DataError, match=f"{count} trees"):
            parse_tree(text)


@pytest.mark.parametrize("word", ["-LRB-", "a-LRB-s-RRB-", "-LRB-LRB-", "-RRB-LRB-", "LRB", "-lrb-", "[", "--"])
def test_brackets_in_words(word: str) -> None:
    assert escape(unescape(word)) == word
    assert unescape("-LRB-s-RRB-") == "(s)"
