"""Conversion of a parser's outputs into trees, and their scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.extras.parsing.brackets import BracketScore, score_trees
from manyheads.extras.parsing.parsing_text import ParsingTask
from manyheads.extras.parsing.trees import Node, parse_tree
from manyheads.text.words import words_of

__all__ = ["SHORT", "ParseReport", "judge_written", "judge_trees"]

SHORT = 40
"""Words of the longest sentence in the second of the two usual figures."""


@dataclass(frozen=True, kw_only=True)
class ParseReport:
    """All scores of a set of trees.

    Args:
        all: of all sentences.
        short: of the sentences with at most SHORT words.
        trees: the predicted trees; None if there was none.
        ill_formed: number of sentences whose output was not a well-formed tree over the right number of words; None if
            trees were given instead of outputs.
        repairs: number of repairs of each kind, see `bracketing.REPAIRS`.
    """

    all: BracketScore
    short: BracketScore
    trees: list[Node | None]
    ill_formed: int | None
    repairs: Counter[str]


def judge_written(
    task: ParsingTask, sentences: Sequence[str], written: Sequence[str], gold: Sequence[str]
) -> ParseReport:
    """Convert a model's outputs into trees and score them.

    Args:
        task: the model's task.
        sentences: the model's inputs.
        written: the model's output for each, in the format of `ParsingTask.target`.
        gold: the correct trees, as lines of text.

    Raises: DataError: a gold tree is not a tree, or counts differ.
    """
    trees: list[Node | None] = []
    repairs: Counter[str] = Counter()
    ill_formed = 0
    for sentence, text in zip(sentences, written, strict=True):
        if not words_of(sentence):
            trees.append(None)
            continue
        restored = task.restore(sentence, text)
        trees.append(restored.tree)
        repairs.update(restored.repairs)
        ill_formed += bool(restored.repairs)
    return judge_trees(trees, gold, root=task.settings.root, ill_formed=ill_formed, repairs=repairs)


def judge_trees(
    trees: Sequence[Node | None],
    gold: Sequence[str],
    *,
    root: str | None = None,
    ill_formed: int | None = None,
    repairs: Counter[str] | None = None,
) -> ParseReport:
    """Score given trees.

    Args: root: the label that the model puts at the top of every tree, whose brackets do not count, in either tree.

    Raises: DataError: a gold tree is not a tree, or counts differ.
    """
    right = [_outermost(parse_tree(line, f"Gold tree {number}"), root) for number, line in enumerate(gold, 1)]
    judged = [None if tree is None else _outermost(tree, root) for tree in trees]
    return ParseReport(
        all=score_trees(right, judged),
        short=score_trees(right, judged, max_words=SHORT),
        trees=list(trees),
        ill_formed=ill_formed,
        repairs=Counter() if repairs is None else repairs,
    )


def _outermost(tree: Node, root: str | None) -> Node:
    """Return the tree with an empty label in place of the root's, as in the Penn Treebank."""
    return Node("", tree.children) if tree.label == root else tree
