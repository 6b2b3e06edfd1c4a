"""Trees as labelled spans of words, the form that a chart parser learns and predicts.

Paper: Stern, Andreas and Klein 2017, arXiv:1705.03919, sec. 2: a span has at most one label, so a chain of constituents
over the same words, such as S over VP, becomes one label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from manyheads.extras.parsing.bracketing import normal_form
from manyheads.extras.parsing.trees import MAX_DEPTH, Leaf, Node, escape, unescape
from manyheads.text.settings import ParsingSettings

__all__ = ["Span", "SpanTree", "spans_of", "tree_of"]

Span = tuple[int, int, str]
"""First word, first word after it, and the label; a chain is written from the top, with spaces: `S VP`."""

_CHAIN = " "  # no label contains white space


@dataclass(frozen=True, slots=True)
class SpanTree:
    """A sentence as words in plain text, their tags, and its constituents below the root."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    spans: tuple[Span, ...]


def spans_of(tree: Node, settings: ParsingSettings) -> SpanTree:
    """Return the tree's normal form as spans; `tree_of` restores it.

    Args: settings: the parts of the tree that are kept; its root must be a label.

    Raises: DataError: the tree contains only traces, or is nested more than MAX_DEPTH deep.
    """
    if settings.root is None:
        raise ValueError("A tree of spans needs the label of a root.")
    leaves: list[Leaf] = []
    labels: dict[tuple[int, int], str] = {}

    def walk(part: Node | Leaf) -> None:
        if isinstance(part, Leaf):
            leaves.append(part)
            return
        start = len(leaves)
        for child in part.children:
            walk(child)
        place = (start, len(leaves))
        labels[place] = part.label + (_CHAIN + labels[place] if place in labels else "")

    for child in normal_form(tree, settings).children:
        walk(child)
    words, tags = (unescape(leaf.word) for leaf in leaves), (leaf.tag for leaf in leaves)
    return SpanTree(tuple(words), tuple(tags), tuple((*place, label) for place, label in sorted(labels.items())))


def tree_of(words: Sequence[str], tags: Sequence[str], spans: Iterable[Span], root: str) -> Node:
    """Return the tree with these constituents under a root.

    Args:
        words: in plain text, at least one.
        tags: of the words.
        spans: two of them are either disjoint or one is inside the other. If more than MAX_DEPTH constituents are
            nested, the inner ones are left out.
        root: its label.
    """
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    leaves = [Leaf(tag, escape(word)) for tag, word in zip(tags, words, strict=True)]
    position = 0

    def children(start: int, end: int, depth: int) -> tuple[Node | Leaf, ...]:
        """The parts of a constituent at that depth; takes the spans inside from the ordered list."""
        nonlocal position
        found: list[Node | Leaf] = []
        while start < end:
            if position < len(ordered) and ordered[position][0] == start and ordered[position][1] <= end:
                _, stop, label = ordered[position]
                position += 1
                chain = label.split(_CHAIN)[: max(0, MAX_DEPTH - depth)]
                if not chain:
                    continue
                inside = children(start, stop, depth + len(chain))
                for name in reversed(chain):
                    inside = (Node(name, inside),)
                found += inside
                start = stop
            else:
                found.append(leaves[start])
                start += 1
        return tuple(found)

    return Node(root, children(0, len(leaves), 1))
