"""Baselines: labels as counted, shapes as said."""

import pytest

from manyheads.errors import DataError
from manyheads.extras.parsing.sequence_task.evaluate import Baseline
from manyheads.extras.parsing.trees import format_tree, leaves_of, parse_tree

TRAINING = [
    parse_tree("(ROOT (S (NP (A a)) (VP (B b) (NP-OBJ (C c) (D d))) (. .)))"),
    parse_tree("(ROOT (S (NP (A a)) (VP (B b) (NP (C c) (D d))) (. !)))"),
    parse_tree("(ROOT (NP (A a) (PP (B b) (NP (C c)))))"),
]


def test_flat() -> None:
    baseline = Baseline("flat", TRAINING)
    assert format_tree(baseline.tree("x y .") or TRAINING[0]) == "(ROOT (S (XX x) (XX y) (XX .)))"
    assert format_tree(baseline.tree("x (y)") or TRAINING[0]) == "(ROOT (NP (XX x) (XX -LRB-y-RRB-)))"
    assert baseline.tree("  ") is None
    assert "S over sentences that end in a sign, NP over others" in baseline.describe()


def test_right_branching() -> None:
    baseline = Baseline("right", TRAINING)
    tree = baseline.tree("w x y z .")
    assert tree is not None
    assert format_tree(tree) == "(ROOT (S (XX w) (VP (XX x) (NP (XX y) (XX z))) (XX .)))"
    assert format_tree(baseline.tree("w x y") or tree) == "(ROOT (NP (XX w) (NP (XX x) (XX y))))"
    assert format_tree(baseline.tree(".") or tree) == "(ROOT (S (XX .)))"
    words = [f"w{number}" for number in range(400)]
    long = baseline.tree(" ".join(words))
    assert long is not None
    assert [leaf.word for leaf in leaves_of(parse_tree(format_tree(long)))] == words


def test_without_trees() -> None:
    with pytest.raises(DataError, match="training data has no trees"):
        Baseline("flat", [])
