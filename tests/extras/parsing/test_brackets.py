"""Bracket scores: cases counted by hand, and a slow obvious implementation of the same rules beside ours."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.errors import DataError
from manyheads.extras.parsing.brackets import PUNCTUATION, BracketScore, judge_trees, judge_written, score_trees
from manyheads.extras.parsing.tokenizer import ParsingTask
from manyheads.extras.parsing.trees import Leaf, Node, ParsingSettings, format_tree, leaves_of, parse_tree

GOLD = "(ROOT (S (NP-SBJ (DT The) (NN cat)) (VP (VBZ sits) (PRT (RP down)) (PP (IN on) (NP (PRP it)))) (. .)))"
"""Brackets that count, as (label, first, end): S 0-6, NP 0-2, VP 2-6, ADVP 3-4, PP 4-6, NP 5-6."""


def score(gold: str, judged: str) -> BracketScore:
    return score_trees([parse_tree(gold)], [parse_tree(judged)])


def test_the_tree_itself() -> None:
    found = score(GOLD, GOLD)
    assert (found.matched, found.gold, found.found, found.exact, found.crossing) == (6, 6, 6, 1, 0)
    assert (found.f1, found.exact_match, found.tagging_accuracy) == (100.0, 100.0, 100.0)
    assert (found.words, found.tags) == (6, 6)


@pytest.mark.parametrize(
    ("judged", "matched", "found", "exact", "crossing"),
    [
        # functions and the root do not count, and PRT is ADVP
        ("(TOP (S=1 (NP (A The) (A cat)) (VP (A sits) (ADVP (A down)) (PP-X (A on) (NP (A it)))) (A .)))", 6, 6, 1, 0),
        # the full stop has no position: it may be anywhere
        ("(S (NP (A The) (A cat)) (VP (A sits) (PRT (A down)) (PP (A on) (NP (A it) (A .)))))", 6, 6, 1, 0),
        # a bracket over the full stop alone is none
        ("(S (NP (A The) (A cat)) (VP (A sits) (PRT (A down)) (PP (A on) (NP (A it)))) (X (A .)))", 6, 6, 1, 0),
        # another label
        ("(S (NP (A The) (A cat)) (VP (A sits) (PRT (A down)) (NP (A on) (NP (A it)))) (A .))", 5, 6, 0, 0),
        # a bracket twice: the second has no partner
        ("(S (NP (NP (A The) (A cat))) (VP (A sits) (PRT (A down)) (PP (A on) (NP (A it)))) (A .))", 6, 7, 0, 0),
        # cat sits: crosses NP and VP, and is one crossing bracket
        ("(S (A The) (NP (A cat) (A sits)) (A down) (A on) (NP (A it)) (A .))", 2, 3, 0, 1),
        # flat
        ("(S (A The) (A cat) (A sits) (A down) (A on) (A it) (A .))", 1, 1, 0, 0),
        # nothing below the root
        ("(ROOT (A The) (A cat) (A sits) (A down) (A on) (A it) (A .))", 0, 0, 0, 0),
    ],
)
def test_by_hand(judged: str, matched: int, found: int, exact: int, crossing: int) -> None:
    result = score(GOLD, judged)
    assert (result.matched, result.gold, result.found) == (matched, 6, found)
    assert (result.exact, result.crossing) == (exact, crossing)
    assert result.f1 == pytest.approx(200 * matched / (6 + found))
    assert (result.words, result.tags) == (6, 0)


def test_unary_chains_match_as_often_as_they_are_there() -> None:
    gold = "(S (NP (NP (NP (N a)))) (V b))"
    assert score(gold, "(S (NP (NP (N a))) (V b))").matched == 3
    assert score(gold, "(S (NP (NP (NP (NP (N a))))) (V b))").matched == 4


def test_traces_are_not_there() -> None:
    gold = "(S (NP (-NONE- *)) (NP (N a)) (VP (V b) (SBAR (-NONE- 0) (S (-NONE- *T*)))))"
    found = score(gold, "(S (NP (N a)) (VP (V b)))")
    assert (found.matched, found.gold, found.found, found.exact) == (3, 3, 3, 1)


def test_other_words_are_an_error_and_left_out() -> None:
    gold = [parse_tree(GOLD)] * 4
    found = score_trees(
        gold, [parse_tree(GOLD), None, parse_tree("(S (A The))"), parse_tree(GOLD.replace("cat", "dog"))]
    )
    assert (found.sentences, found.errors, found.gold) == (1, 3, 6)
    assert found.f1 == 100.0
    with pytest.raises(DataError, match="1 predicted trees but 4"):
        score_trees(gold, [None])


def test_spelled_brackets_are_the_same_words() -> None:
    gold, judged = Node("S", (Leaf("N", "-LRB-"),)), Node("S", (Leaf("N", "("),))
    assert score_trees([gold], [judged]).exact == 1


def test_short_sentences_have_their_own_figures() -> None:
    long = "(S " + "(N a) " * 40 + "(. .))"
    report = judge_trees([parse_tree(GOLD), parse_tree(long)], [GOLD, long])
    assert (report.all.sentences, report.short.sentences) == (2, 1)
    assert (report.ill_formed, dict(report.repairs)) == (None, {})


def test_what_a_model_wrote_is_mended_counted_and_judged() -> None:
    sentences = ["The cat sits down on it .", "", "The cat sits down on it ."]
    whole = "(S (NP XX XX )NP (VP XX (PRT XX )PRT (PP XX (NP XX )NP )PP )VP XX )S"
    report = judge_written(ParsingTask(), sentences, [whole, whole, whole[:-6]], [GOLD] * 3)
    assert (report.ill_formed, dict(report.repairs)) == (1, {"missing_words": 1, "unclosed": 1})
    assert (report.all.sentences, report.all.errors, report.all.f1) == (2, 1, 100.0)
    assert report.all.tagging_accuracy is None
    assert format_tree(report.trees[0] or Node("", ())).startswith("(ROOT (S (NP (XX The)")


def test_a_root_of_any_name_does_not_count() -> None:
    tree = "(VROOT (S (N a)))"
    for gold in (tree, "(ROOT (S (N a)))", "(S (N a))"):
        score = judge_trees([parse_tree(tree)], [gold], root="VROOT").all
        assert (score.matched, score.gold, score.found) == (1, 1, 1)
    assert judge_trees([parse_tree(tree)], [tree]).all.gold == 2
    written = judge_written(ParsingTask(ParsingSettings(root="VROOT")), ["a"], ["(S XX )S"], [tree])
    assert (written.all.gold, written.all.f1) == (1, 100.0)


def slow(gold: Node, judged: Node) -> tuple[int, int, int, int]:
    """Matched, gold, found, crossing: a bracket is the set of the words in it, and partners are crossed off a list."""
    marked = [leaf.tag not in PUNCTUATION for leaf in leaves_of(gold) if leaf.tag != "-NONE-"]

    def brackets(tree: Node) -> list[tuple[str, frozenset[int]]]:
        numbers = {}
        for leaf in numbered(tree):
            if leaf[1].tag != "-NONE-":
                numbers[leaf[0]] = len(numbers)
        found = []
        for label, places in parts(tree):
            inside = frozenset(numbers[place] for place in places if place in numbers and marked[numbers[place]])
            for sign in "-=":
                label = label.partition(sign)[0]
            label = "ADVP" if label == "PRT" else label
            if inside and label not in ("", "TOP", "ROOT", "S1"):
                found.append((label, inside))
        return found

    right, others = brackets(gold), brackets(judged)
    left, matched = list(right), 0
    for bracket in others:
        if bracket in left:
            left.remove(bracket)
            matched += 1
    crossing = sum(any(a & b and a - b and b - a for _, b in right) for _, a in others)
    return matched, len(right), len(others), crossing


def numbered(tree: Node) -> list[tuple[int, Leaf]]:
    return list(enumerate(leaves_of(tree)))


def parts(tree: Node, first: int = 0) -> list[tuple[str, range]]:
    found = [(tree.label, range(first, first + len(leaves_of(tree))))]
    for child in tree.children:
        if isinstance(child, Node):
            found += parts(child, first)
        first += len(leaves_of(child))
    return found


LABELS = st.sampled_from(["NP", "VP", "NP-SBJ", "PRT", "ADVP", "S=2", "ROOT", "TOP"])


@st.composite
def tree_over(draw: st.DrawFn, leaves: list[Leaf]) -> Node:
    """Any tree over the leaves."""
    children: list[Node | Leaf] = list(leaves)
    for _ in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, len(children) - 1))
        end = draw(st.integers(start + 1, len(children)))
        children[start:end] = [Node(draw(LABELS), tuple(children[start:end]))]
    return Node("ROOT", tuple(children))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_same_as_slowly(data: st.DataObject) -> None:
    tags = data.draw(st.lists(st.sampled_from(["NN", "IN", ",", ".", ":"]), min_size=1, max_size=9))
    leaves = [Leaf(tag, f"w{place}") for place, tag in enumerate(tags)]
    judged = data.draw(tree_over([Leaf("XX", leaf.word) for leaf in leaves]))
    for place in data.draw(st.lists(st.integers(0, len(leaves)), max_size=2)):
        leaves.insert(place, Leaf("-NONE-", "*"))
    gold = data.draw(tree_over(leaves))
    found = score_trees([gold], [judged])
    assert (found.matched, found.gold, found.found, found.crossing) == slow(gold, judged)
    assert found.exact == (found.matched == found.gold == found.found)
