"""Trees as sequences: the round trip is exact, and whatever a model writes becomes a tree over the words."""

import gzip
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.trees import (
    MAX_DEPTH,
    REPAIRS,
    Leaf,
    Node,
    ParsingSettings,
    category,
    format_tree,
    leaves_of,
    linearise,
    normal_form,
    parse_tree,
    restore,
    sentence_of,
    unescape,
)

PAPER = ParsingSettings()
LOSSLESS = ParsingSettings(tags="keep", functions="keep", traces="keep", root=None)
UNTAGGED = ParsingSettings(functions="keep", traces="keep", root=None)
TREE = "(ROOT (S (NP-SBJ=2 (PRP She)) (VP (VBZ has) (NP (-NONE- *T*-1))) (. .)))"

LABELS = st.sampled_from(["NP", "S", "VP", "ROOT", "NP-SBJ", "X=1", "-LRB-", "TOP"])
WORDS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="() \t\n\r\v\f"), min_size=1, max_size=5)
LEAVES = st.builds(Leaf, st.sampled_from(["NN", ",", "XX", "-RRB-"]), WORDS)
NODES = st.recursive(
    st.builds(lambda label, leaf: Node(label, (leaf,)), LABELS, LEAVES),
    lambda parts: st.builds(Node, LABELS, st.lists(st.one_of(parts, LEAVES), min_size=1, max_size=4).map(tuple)),
    max_leaves=12,
)
TOKENS = st.one_of(
    st.sampled_from(["(S", "(NP", "(VP", ")S", ")NP", ")VP", "XX", "XX", "(ROOT", ")ROOT"]),
    st.sampled_from(["(", ")", "NN", "word", "()", "((S", "(NP)NP", ")(", "\u2028", "\x00"]),
    st.text(max_size=4),
)


def words_of(tree: Node) -> list[str]:
    return [unescape(leaf.word) for leaf in leaves_of(tree)]


def test_the_form_of_the_paper() -> None:
    tree = parse_tree(TREE)
    assert linearise(tree, PAPER) == "(S (NP XX )NP (VP XX )VP XX )S"
    assert linearise(tree, ParsingSettings(tags="keep")) == "(S (NP PRP )NP (VP VBZ )VP . )S"
    assert linearise(tree, ParsingSettings(functions="keep")) == "(S (NP-SBJ=2 XX )NP-SBJ=2 (VP XX )VP XX )S"
    assert linearise(tree, LOSSLESS).startswith("(ROOT (S (NP-SBJ=2 PRP )NP-SBJ=2 (VP VBZ (NP -NONE- )NP")
    assert sentence_of(parse_tree("(S (-LRB- -LRB-) (A b))")) == "( b"
    assert [category(label) for label in ("NP-SBJ", "NP=1", "-LRB-", "=", "", "S")] == [
        "NP",
        "NP",
        "-LRB-",
        "=",
        "",
        "S",
    ]


@pytest.mark.parametrize("root", ["( (S (A b)))", "(TOP (S (A b)))", "(S1 (S (A b)))", "(S (A b))"])
def test_roots_that_stand_for_nothing(root: str) -> None:
    tree = parse_tree(root)
    assert linearise(tree, PAPER) == "(S XX )S"
    assert format_tree(normal_form(tree, PAPER)) == "(ROOT (S (XX b)))"
    assert format_tree(restore(linearise(tree, LOSSLESS), ["b"], LOSSLESS).tree) == root


@settings(deadline=None, max_examples=60)
@given(tree=NODES)
@example(tree=parse_tree("(ROOT (ROOT (A b)))"))
@example(tree=parse_tree("(ROOT (ROOT (NP (A b))))"))
def test_every_tree_comes_back(tree: Node) -> None:
    words, tags = words_of(tree), [leaf.tag for leaf in leaves_of(tree)]
    found = restore(linearise(tree, LOSSLESS), words, LOSSLESS)
    assert (found.tree, dict(found.repairs)) == (tree, {})
    found = restore(linearise(tree, UNTAGGED), words, UNTAGGED, tags)
    assert (found.tree, dict(found.repairs)) == (tree, {})
    found = restore(linearise(tree, PAPER), words, PAPER)
    assert found.tree == normal_form(tree, PAPER)
    assert not found.repairs.keys() - {"no_root"}


@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.slow), "dev", "test"])
def test_every_tree_of_gum_comes_back(shared: Path, split: str) -> None:
    path = shared / "data" / "gum-constituency" / f"gum.{split}.ptb.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        lines = file.read().removesuffix("\n").split("\n")
    assert len(lines) == {"train": 3707, "dev": 438, "test": 491}[split]
    for line in lines:
        tree = parse_tree(line)
        sentence, tags = sentence_of(tree), [leaf.tag for leaf in leaves_of(tree)]
        for form, kept in ((LOSSLESS, None), (UNTAGGED, tags)):
            found = restore(linearise(tree, form), sentence.split(" "), form, kept)
            assert (format_tree(found.tree), dict(found.repairs)) == (line, {})
        found = restore(linearise(tree, PAPER), sentence.split(" "), PAPER)
        assert (found.tree, dict(found.repairs)) == (normal_form(tree, PAPER), {})


@settings(deadline=None, max_examples=120)
@given(
    tokens=st.lists(TOKENS, max_size=30),
    words=st.lists(WORDS, min_size=1, max_size=6),
    form=st.sampled_from([PAPER, LOSSLESS, ParsingSettings(tags="keep", root="TOP")]),
)
def test_any_text_becomes_a_tree_over_the_words(tokens: list[str], words: list[str], form: ParsingSettings) -> None:
    found = restore(" ".join(tokens), words, form)
    assert words_of(found.tree) == [unescape(word) for word in words]
    assert parse_tree(format_tree(found.tree)) == found.tree
    assert form.root is None or found.tree.label == form.root
    assert set(found.repairs) <= set(REPAIRS)
    assert all(count > 0 for count in found.repairs.values())
    if form.root is not None and not found.repairs:  # what needed no repair is what would be learned
        again = restore(linearise(found.tree, form), words, form)
        assert (again.tree, dict(again.repairs)) == (found.tree, {})


@pytest.mark.parametrize(
    ("written", "tree", "repairs"),
    [
        ("(S (NP XX )NP (VP XX XX )VP )S", "(S (NP a) (VP b c))", {}),
        ("(S (NP XX )NP (VP XX XX", "(S (NP a) (VP b c))", {"unclosed": 2}),
        ("(S (NP XX (VP XX XX )VP )S", "(S (NP a (VP b c)))", {"unclosed": 1}),
        ("(S (NP XX )NP )PP (VP XX XX )VP )S", "(S (NP a) (VP b c))", {"unopened": 1}),
        ("(S (NP XX )PP (VP XX XX )VP )S", "(S (NP a) (VP b c))", {"mislabelled": 1}),
        ("(S (NP )NP (VP XX XX XX )VP )S", "(S (VP a b c))", {"empty": 1}),
        ("(S XX XX )S", "(S a b c)", {"missing_words": 1}),
        ("(S XX (NP XX", "(S a (NP b) c)", {"missing_words": 1, "unclosed": 2}),
        ("(S XX XX XX XX XX )S", "(S a b c)", {"extra_words": 2}),
        ("(S XX )S (NP XX XX )NP", "(S a) (NP b c)", {"no_root": 1}),
        ("XX XX XX", "a b c", {"no_root": 1}),
        ("", "a b c", {"no_root": 1, "missing_words": 3}),
        ("(S ( XX XX XX ) )S", "(S a b c)", {"unlabelled": 1, "unopened": 1}),
        ("(S)S (NP XX XX XX )NP", "(NP a b c)", {"empty": 1}),
    ],
)
def test_each_repair(written: str, tree: str, repairs: dict[str, int]) -> None:
    found = restore(written, ["a", "b", "c"], PAPER)
    shown = format_tree(found.tree).replace("(XX a)", "a").replace("(XX b)", "b").replace("(XX c)", "c")
    assert shown == f"(ROOT {tree})"
    assert dict(found.repairs) == repairs


def test_depth_is_limited() -> None:
    found = restore("(S " * 999 + "XX", ["a"], PAPER)
    assert found.repairs["too_deep"] == 999 - MAX_DEPTH
    assert parse_tree(format_tree(found.tree)) == found.tree
    text = "(S " * MAX_DEPTH + "(A b)" + ")" * MAX_DEPTH
    assert format_tree(restore(linearise(parse_tree(text), LOSSLESS), ["b"], LOSSLESS).tree) == text
    with pytest.raises(DataError, match="nested more"):
        normal_form(parse_tree(f"(S {text})"), LOSSLESS)


def test_mistakes() -> None:
    with pytest.raises(DataError, match="at least one word"):
        restore("XX", [], PAPER)
    with pytest.raises(DataError, match="only traces"):
        linearise(parse_tree("(S (-NONE- *))"), PAPER)
    for root in ("", "a b", "(S"):
        with pytest.raises(ConfigError, match="root"):
            ParsingSettings(root=root)
