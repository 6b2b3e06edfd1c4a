"""Trees that need no model, so that a parser's score has something to be held against.

Labels are learned from training trees by counting. Words are seen without their tags, as by a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from manyheads.errors import DataError
from manyheads.text.bracketing import OUTER_LABELS, SLOT, category
from manyheads.text.parsing import words_of
from manyheads.text.trees import Leaf, Node, escape, leaves_of

__all__ = ["Baseline", "BaselineKind"]

BaselineKind = Literal["flat", "right"]
DEEPEST = 150  # constituents inside one another


class Baseline:
    """Majority labels on trees of one shape.

    `flat`: one constituent over the sentence, with the label most often found there (counted apart for sentences that
    end in a sign, such as a full stop, and those that do not). `right`: inside it, from each word to the end (a sign
    there left outside), with the label most often found on a constituent of that length at the end of a sentence.

    Args:
        kind: the shape.
        trees: training trees; their labels are counted.

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
            raise DataError("A baseline needs training trees, and there are none.")
        usual = _most(sum(whole.values(), Counter()))
        self._whole = {signed: _most(whole[signed]) if signed in whole else usual for signed in (True, False)}
        everywhere: Counter[str] = sum(by_length.values(), Counter())
        self._usual = _most(everywhere) if everywhere else usual
        self._by_length = {length: _most(labels) for length, labels in by_length.items()}

    def describe(self) -> str:
        """What it does, for the protocol."""
        whole = f"{self._whole[True]} over sentences that end in a sign, {self._whole[False]} over others"
        if self._kind == "flat":
            return f"flat: {whole}"
        return f"right-branching: {whole}, inside them the usual label of each length"

    def tree(self, sentence: str) -> Node | None:
        """The tree of a sentence; None without words."""
        leaves: list[Node | Leaf] = [Leaf(SLOT, escape(word)) for word in words_of(sentence)]
        if not leaves:
            return None
        signed = _is_sign(words_of(sentence)[-1])
        inside = leaves
        if self._kind == "right":
            inside = self._branching(leaves[:-1]) + leaves[-1:] if signed else self._branching(leaves)
        return Node(OUTER_LABELS[1], (Node(self._whole[signed], tuple(inside)),))

    def _branching(self, leaves: list[Node | Leaf]) -> list[Node | Leaf]:
        """The first word, and a constituent of all others; of long sentences only the last so many words branch."""
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
    """The label over the whole sentence, below the root."""
    while tree.label in OUTER_LABELS and len(tree.children) == 1 and isinstance(tree.children[0], Node):
        tree = tree.children[0]
    return category(tree.label)


def _last_constituents(tree: Node) -> list[tuple[str, int]]:
    """Label and length of each constituent that ends with the sentence, or a word before, and begins after it."""
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
    """The most frequent; of equals the first in the alphabet."""
    return min(labels, key=lambda label: (-labels[label], label))
