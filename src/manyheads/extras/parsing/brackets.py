"""Labelled bracket scores of constituency trees, by the rules of evalb with its parameter file COLLINS.prm.

The rules (Black et al. 1991; Sekine and Collins 1997):
 1. Brackets of the root (TOP, ROOT, S1 or empty) and traces (tag -NONE-) do not count.
 2. Words with one of the tags `, : `` '' .` are removed before positions are counted; a bracket that is then empty
    does not count. The gold tree's tags decide which words these are, because both trees have the same words.
 3. A bracket is (label, first word, last word). Labels are cut at - and =, and PRT counts as ADVP.
 4. Brackets match one to one: two equal ones, as in a unary chain NP over NP, need two.
 5. Precision, recall and F1 are computed from the sums over all sentences. A sentence whose words differ is an error:
    it is counted and left out.
 6. A bracket crosses if it overlaps one of the gold tree and neither contains the other.
 7. Tags are compared on the words that remain after rule 2. The length of a sentence is counted after rule 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.errors import DataError
from manyheads.extras.parsing.trees import (
    OUTER_LABELS,
    SLOT,
    TRACE,
    Leaf,
    Node,
    category,
    escape,
    leaves_of,
    parse_tree,
)
from manyheads.text.words import words_of

if TYPE_CHECKING:
    from manyheads.extras.parsing.tokenizer import ParsingTask

PUNCTUATION = frozenset({",", ":", "``", "''", "."})
EQUAL_LABELS = {"PRT": "ADVP"}
SIGNATURE = "evalb:COLLINS|labelled|functions:cut|PRT=ADVP|punctuation:by gold tags"

Bracket = tuple[str, int, int]
"""Label, first word, first word after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BracketScore:
    """Sums over sentences.

    Args:
        sentences: number of compared sentences.
        errors: sentences left out, because the words of the two trees differ or there is no tree.
        matched: brackets that are in both trees.
        gold: brackets of the gold trees.
        found: brackets of the predicted trees.
        exact: sentences with all brackets equal.
        crossing: brackets of the predicted trees that cross one of the gold tree.
        words: words left by rule 2, in sentences whose predicted trees have tags.
        tags: how many of these have the right tag.
    """

    sentences: int
    errors: int
    matched: int
    gold: int
    found: int
    exact: int
    crossing: int
    words: int
    tags: int

    @property
    def precision(self) -> float:
        """In percent; 0 if no bracket was predicted."""
        return _percent(self.matched, self.found)

    @property
    def recall(self) -> float:
        """In percent."""
        return _percent(self.matched, self.gold)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, in percent."""
        return _percent(2 * self.matched, self.gold + self.found)

    @property
    def exact_match(self) -> float:
        """Sentences with all brackets equal, in percent."""
        return _percent(self.exact, self.sentences)

    @property
    def average_crossing(self) -> float:
        """Crossing brackets per sentence."""
        return self.crossing / self.sentences if self.sentences else 0.0

    @property
    def tagging_accuracy(self) -> float | None:
        """In percent; None if the predicted trees have no tags."""
        return _percent(self.tags, self.words) if self.words else None


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0


def score_trees(gold: Sequence[Node], judged: Sequence[Node | None], *, max_words: int | None = None) -> BracketScore:
    """Compare trees, sentence by sentence.

    Args:
        gold: the reference trees.
        judged: the predicted trees, the same number; None if there is no tree.
        max_words: compare only sentences of at most this many words (punctuation included).

    Raises: DataError: counts differ.
    """
    if len(gold) != len(judged):
        raise DataError(
            f"There are {len(judged)} predicted trees but {len(gold)} gold trees; the numbers must be equal."
        )
    sums: Counter[str] = Counter()
    for right, tree in zip(gold, judged, strict=True):
        if max_words is None or len(_without_traces(right)) <= max_words:
            sums.update(_compare(right, tree))
    return BracketScore(**{name: sums[name] for name in BracketScore.__dataclass_fields__})


def _compare(gold: Node, judged: Node | None) -> dict[str, int]:
    right = _without_traces(gold)
    leaves = [] if judged is None else _without_traces(judged)
    if judged is None or [escape(leaf.word) for leaf in right] != [escape(leaf.word) for leaf in leaves]:
        return {"errors": 1}
    kept = [leaf.tag not in PUNCTUATION for leaf in right]
    gold_brackets, brackets = brackets_of(gold, kept), brackets_of(judged, kept)
    matched = (gold_brackets & brackets).total()
    counts = {
        "sentences": 1,
        "matched": matched,
        "gold": gold_brackets.total(),
        "found": brackets.total(),
        "exact": int(gold_brackets == brackets),
        "crossing": sum(count for bracket, count in brackets.items() if _crosses(bracket, gold_brackets)),
    }
    if any(leaf.tag != SLOT for leaf in leaves):
        pairs = [(a.tag, b.tag) for a, b, keep in zip(right, leaves, kept, strict=True) if keep]
        counts |= {"words": len(pairs), "tags": sum(a == b for a, b in pairs)}
    return counts


def _without_traces(tree: Node) -> list[Leaf]:
    return [leaf for leaf in leaves_of(tree) if leaf.tag != TRACE]


def brackets_of(tree: Node, kept: Iterable[bool]) -> Counter[Bracket]:
    """Return the brackets that count.

    Args:
        tree: any tree.
        kept: for each word that is not a trace, whether it has a position.
    """
    found: Counter[Bracket] = Counter()
    marks = iter(kept)

    def walk(part: Node | Leaf, start: int) -> int:
        if isinstance(part, Leaf):
            return start + (part.tag != TRACE and next(marks))
        end = start
        for child in part.children:
            end = walk(child, end)
        label = category(part.label)
        if end > start and label not in OUTER_LABELS:
            found[EQUAL_LABELS.get(label, label), start, end] += 1
        return end

    walk(tree, 0)
    return found


def _crosses(bracket: Bracket, others: Iterable[Bracket]) -> bool:
    _, start, end = bracket
    return any(a < start < b < end or start < a < end < b for _, a, b in others)


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
