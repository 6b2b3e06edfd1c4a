"""Trees from baselines without a model, for comparison with a parser's score.

Labels are counted in training trees. Baselines see the words without their tags, like a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from manyheads.errors import DataError
from manyheads.extras.parsing.bracketing import OUTER_LABELS, SLOT, category
from manyheads.extras.parsing.trees import Leaf, Node, escape, leaves_of
from manyheads.text.words import words_of

__all__ = ["Baseline", "BaselineKind"]

BaselineKind = Literal["flat", "right"]
DEEPEST = 150  # constituents inside one another


class Baseline:
    """Majority labels on trees of a fixed shape.

    `flat`: one constituent over the sentence, with the most frequent label there (counted separately for sentences that
    end in a sign, such as a full stop). `right`: below it, a constituent from each word to the end (without a sign
    there), with the most frequent label of a constituent of that length at the end of a sentence.

    Args:
        kind: the shape.
        trees: training trees whose labels are counted.

    Raises: DataError: there are none.
    """

    def __init__(self, kind: BaselineKind, trees: Iterable[Node]) -> None:
        self._kind = kind
        whole: dict[bool, Counter[str]] = {}
        by_length: dict[int, Counter[str]] = {}
        for tree in trees:
            signed = _is_sign(leaves_of(tree)[-1].word)
            whole.setdefault(signed, Counter())[_top(tree)] += 1
            for label, length in _last_constituents(tree):
                by_length.setdefault(length, Counter())[label] += 1
        if not whole:
            raise DataError("The training data has no trees, from which a baseline is made; give some.")
        usual = _most(sum(whole.values(), Counter()))
        self._whole = {signed: _most(whole[signed]) if signed in whole else usual for signed in (True, False)}
        everywhere: Counter[str] = sum(by_length.values(), Counter())
        self._usual = _most(everywhere) if everywhere else usual
        self._by_length = {length: _most(labels) for length, labels in by_length.items()}

    def describe(self) -> str:
        """Return a description for the report."""
        whole = f"{self._whole[True]} over sentences that end in a sign, {self._whole[False]} over others"
        if self._kind == "flat":
            return f"flat: {whole}"
        return f"right-branching: {whole}, inside them the usual label of each length"

    def tree(self, sentence: str) -> Node | None:
        """Return the tree of a sentence; None without words."""
        leaves: list[Node | Leaf] = [Leaf(SLOT, escape(word)) for word in words_of(sentence)]
        if not leaves:
            return None
        signed = _is_sign(words_of(sentence)[-1])
        inside = leaves
        if self._kind == "right":
            inside = self._branching(leaves[:-1]) + leaves[-1:] if signed else self._branching(leaves)
        return Node(OUTER_LABELS[1], (Node(self._whole[signed], tuple(inside)),))

    def _branching(self, leaves: list[Node | Leaf]) -> list[Node | Leaf]:
        """Return the first word and a constituent of all others; in long sentences only the last DEEPEST words."""
        part: list[Node | Leaf] = leaves[-1:]
        for place in range(len(leaves) - 2, -1, -1):
            length = len(leaves) - 1 - place
            if 2 <= length < DEEPEST:
                part = [Node(self._by_length.get(length, self._usual), tuple(part))]
            part = [leaves[place], *part]
        return part


def _is_sign(word: str) -> bool:
    return not any(char.isalnum() for char in word)


def _top(tree: Node) -> str:
    """Return the label over the whole sentence, below the root."""
    while tree.label in OUTER_LABELS and len(tree.children) == 1 and isinstance(tree.children[0], Node):
        tree = tree.children[0]
    return category(tree.label)


def _last_constituents(tree: Node) -> list[tuple[str, int]]:
    """Return label and length of each constituent that ends at the sentence's end, or a word before it, and begins
    later.
    """
    num_words = len(leaves_of(tree))
    found = []
    waiting: list[tuple[Node | Leaf, int]] = [(tree, 0)]
    while waiting:
        part, start = waiting.pop()
        if isinstance(part, Leaf):
            continue
        length = len(leaves_of(part))
        if start > 0 and length > 1 and num_words - (start + length) <= 1:
            found.append((category(part.label), length))
        for child in part.children:
            waiting.append((child, start))
            start += len(leaves_of(child))
    return found


def _most(labels: Counter[str]) -> str:
    """Return the most frequent label; of equal ones the first in the alphabet."""
    return min(labels, key=lambda label: (-labels[label], label))
