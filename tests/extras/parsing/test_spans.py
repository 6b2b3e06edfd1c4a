"""Trees as labelled spans, and back."""

import pytest

from manyheads.errors import DataError
from manyheads.extras.parsing.span_data import spans_of, tree_of
from manyheads.extras.parsing.trees import MAX_DEPTH, ParsingSettings, format_tree, leaves_of, parse_tree

KEEP = ParsingSettings(tags="keep")
TREE = "(ROOT (S (NP (PRP She)) (VP (VBZ sleeps) (ADVP (RB well))) (. .)))"


def restored(text: str, settings: ParsingSettings = KEEP) -> str:
    tree = spans_of(parse_tree(text), settings)
    return format_tree(tree_of(tree.words, tree.tags, tree.spans, str(settings.root)))


def test_spans_of_a_tree() -> None:
    tree = spans_of(parse_tree(TREE), KEEP)
    assert tree.words == ("She", "sleeps", "well", ".")
    assert tree.tags == ("PRP", "VBZ", "RB", ".")
    assert tree.spans == ((0, 1, "NP"), (0, 4, "S"), (1, 3, "VP"), (2, 3, "ADVP"))


@pytest.mark.parametrize(
    "text",
    [
        TREE,
        "(ROOT (NP (NN Introduction)))",
        "(ROOT (FRAG (NP (NP (DT a) (NN b)) (PP (IN of) (NP (NN c))))))",
        "(ROOT (NP (NN a)) (NP (NN b)))",
        "(ROOT (NN a) (S (VP (VB b))) (. .))",
        "(ROOT (NN a))",
        "(ROOT (NP (-LRB- -LRB-) (NN x) (-RRB- -RRB-)))",
        "(ROOT (S (S (S (VP (VB go))))))",
    ],
)
def test_a_tree_comes_back(text: str) -> None:
    assert restored(text) == text


def test_chains_are_one_label_from_the_top() -> None:
    assert spans_of(parse_tree("(ROOT (S (VP (VB go))))"), KEEP).spans == ((0, 1, "S VP"),)


def test_parts_that_are_left_out() -> None:
    text = "(TOP (S (NP-SBJ=1 (NN cats)) (VP (VBP sleep) (NP (-NONE- *)))))"
    assert restored(text) == "(ROOT (S (NP (NN cats)) (VP (VBP sleep))))"
    kept = ParsingSettings(tags="keep", functions="keep", root="TOP")
    assert restored(text, kept) == "(TOP (S (NP-SBJ=1 (NN cats)) (VP (VBP sleep))))"


def test_a_root_of_its_own_name_is_no_constituent() -> None:
    own = ParsingSettings(tags="keep", root="VROOT")
    tree = TREE.replace("ROOT", "VROOT")
    assert restored(tree, own) == restored(TREE, own) == tree
    assert restored(tree) == f"(ROOT {tree})"


def test_the_order_of_spans_does_not_count() -> None:
    tree = spans_of(parse_tree(TREE), KEEP)
    assert format_tree(tree_of(tree.words, tree.tags, tree.spans[::-1], "ROOT")) == TREE


def test_no_tree_is_deeper_than_trees_may_be() -> None:
    """A search could nest more constituents than a file of trees may hold."""
    count = MAX_DEPTH + 50
    words = [str(place) for place in range(count)]
    spans = [(place, count, "A B") for place in range(count)]
    text = format_tree(tree_of(words, ["X"] * count, spans, "ROOT"))
    assert spans_of(parse_tree(text), KEEP).words == tuple(words)


def test_a_thousand_constituents_inside_one_another() -> None:
    count = 1000
    tree = tree_of(["a"] * count, ["N"] * count, [(start, count, "S") for start in range(count)], "ROOT")
    text = format_tree(tree)
    assert len(leaves_of(parse_tree(text))) == count
    assert text.count("(S") == MAX_DEPTH - 1


def test_errors() -> None:
    with pytest.raises(DataError, match="only traces"):
        spans_of(parse_tree("(ROOT (NP (-NONE- *)))"), KEEP)
    with pytest.raises(ValueError, match="root"):
        spans_of(parse_tree(TREE), ParsingSettings(root=None))
