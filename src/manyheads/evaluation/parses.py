"""What a parser wrote, made into trees and judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.evaluation.brackets import BracketScore, score_trees
from manyheads.text.parsing import ParsingTask, words_of
from manyheads.text.trees import Node, parse_tree

__all__ = ["SHORT", "ParseReport", "judge_written", "judge_trees"]

SHORT = 40
"""Words of the longest sentence in the second of the two usual figures."""


@dataclass(frozen=True, kw_only=True)
class ParseReport:
    """All figures of a set of trees.

    Args:
        all: of all sentences.
        short: of those with at most SHORT words.
        trees: judged; None where there was none.
        ill_formed: sentences whose text was no well-formed tree over the right number of words; None where trees were
            given as trees.
        repairs: what had to be mended, see `bracketing.REPAIRS`.
    """

    all: BracketScore
    short: BracketScore
    trees: list[Node | None]
    ill_formed: int | None
    repairs: Counter[str]


def judge_written(
    task: ParsingTask, sentences: Sequence[str], written: Sequence[str], gold: Sequence[str]
) -> ParseReport:
    """Restore the trees of what a model wrote, and judge them.

    Args:
        task: of the model.
        sentences: as the model read them.
        written: what it wrote for each, as `ParsingTask.target` would.
        gold: the right trees, as lines of text.

    Raises: DataError: a gold tree is none, or counts differ.
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
    return judge_trees(trees, gold, ill_formed=ill_formed, repairs=repairs)


def judge_trees(
    trees: Sequence[Node | None],
    gold: Sequence[str],
    *,
    ill_formed: int | None = None,
    repairs: Counter[str] | None = None,
) -> ParseReport:
    """Judge trees that are there.

    Raises: DataError: a gold tree is none, or counts differ.
    """
    right = [parse_tree(line, f"Gold tree {number}") for number, line in enumerate(gold, 1)]
    return ParseReport(
        all=score_trees(right, trees),
        short=score_trees(right, trees, max_words=SHORT),
        trees=list(trees),
        ill_formed=ill_formed,
        repairs=Counter() if repairs is None else repairs,
    )
