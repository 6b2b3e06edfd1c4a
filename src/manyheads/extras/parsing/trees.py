"""Reading and writing of bracketed trees in the format of treebanks.

`(S (NP (PRP She)) (VP (VBZ sleeps)) (. .))`: a bracket contains a label and further brackets, or a part-of-speech tag
and a word. The outermost label may be empty, as in the Penn Treebank's files. Words write round brackets as -LRB- and
-RRB-.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from manyheads.errors import DataError

MAX_DEPTH = 200
"""Maximum number of constituents above a word, in training data and in output; real trees have about 40."""

_TOKEN = re.compile(r"[()]|[^()\s]+", re.ASCII)  # ASCII: a no-break space is part of a word
_ESCAPED = {"-LRB-": "(", "-RRB-": ")"}
_PREVIEW = 60


@dataclass(frozen=True, slots=True)
class Leaf:
    """A word as written in the file, and its part-of-speech tag."""

    tag: str
    word: str


@dataclass(frozen=True, slots=True)
class Node:
    """A constituent: a label (only the outermost may be empty) and at least one child."""

    label: str
    children: tuple[Node | Leaf, ...]


@dataclass(slots=True)
class _Open:
    """A bracket that is not closed yet. label: None until something follows the bracket."""

    label: str | None = None
    word: str | None = None
    children: list[Node | Leaf] = field(default_factory=list)


def read_trees(lines: Iterable[str | None], name: str) -> Iterator[tuple[int, Node]]:
    """Yield the trees of a file, each with the number of the line where it begins. A tree may span several lines.

    Args:
        lines: the lines of the file; None (a line that could not be read) counts as empty.
        name: the name of the file in messages.

    Raises: DataError: a bracket is missing, superfluous, empty or without a label, or its contents are not valid; the
        message gives the file, the line and the text.
    """
    reader = _Reader(name)
    for number, line in enumerate(lines, 1):
        yield from reader.feed(number, line or "")
    reader.end()


def parse_tree(text: str, where: str = "The text") -> Node:
    """Return the only tree in a text.

    Raises: DataError: the text is not a tree (see `read_trees`), or contains several.
    """
    trees = [tree for _, tree in read_trees([text], where)]
    if len(trees) != 1:
        raise DataError(f"{where} contains {len(trees)} trees, not one: {_preview(text)}.")
    return trees[0]


class _Reader:
    """The open brackets, and the line where their tree began."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[_Open] = []
        self._began = 0
        self._suspect = 0

    def feed(self, number: int, line: str) -> Iterator[tuple[int, Node]]:
        """Yield the trees that end in this line."""
        if line.startswith("(") and self._open and not self._suspect:
            self._suspect = number  # in most files only a tree begins in the first column
        for match in _TOKEN.finditer(line):
            token = match[0]
            if token == "(":  # noqa: S105  (a token of text, not a password)
                if not self._open:
                    self._began = number
                self._begin(number, line)
            elif token == ")":  # noqa: S105  (a token of text, not a password)
                tree = self._end_bracket(number, line)
                if tree is not None:
                    self._suspect = 0
                    yield self._began, tree
            else:
                self._name_or_word(token, number, line)

    def end(self) -> None:
        """Raises: DataError: a tree is not finished."""
        if self._open:
            hint = f" Line {self._suspect} looks like the beginning of another tree." if self._suspect else ""
            many = len(self._open)
            missing = f"{many} closing brackets are" if many > 1 else "a closing bracket is"
            raise DataError(
                f"{self._name}: the tree that begins in line {self._began} is not closed: {missing} missing.{hint}"
            )

    def _begin(self, number: int, line: str) -> None:
        if len(self._open) > MAX_DEPTH + 2:
            raise self._wrong(number, line, f"brackets are nested more than {MAX_DEPTH} deep")
        if self._open:
            above = self._open[-1]
            if above.word is not None:
                raise self._wrong(number, line, f"a bracket contains the word {above.word!r} and another bracket")
            if above.label is None:
                above.label = ""
                if len(self._open) > 1:
                    raise self._wrong(number, line, "a bracket inside a tree has no label")
        self._open.append(_Open())

    def _name_or_word(self, token: str, number: int, line: str) -> None:
        if not self._open:
            raise self._wrong(number, line, f"{token!r} is outside all brackets")
        bracket = self._open[-1]
        if bracket.label is None:
            bracket.label = token
        elif bracket.children:
            raise self._wrong(number, line, f"the word {token!r} has no bracket of its own, (TAG word)")
        elif bracket.word is not None:
            raise self._wrong(number, line, f"a bracket contains two words, {bracket.word!r} and {token!r}")
        else:
            bracket.word = token

    def _end_bracket(self, number: int, line: str) -> Node | None:
        """Close the innermost bracket. Returns: the tree, if this was its last bracket."""
        if not self._open:
            raise self._wrong(number, line, "a closing bracket has no opening bracket")
        bracket = self._open.pop()
        if bracket.label is None or (bracket.word is None and not bracket.children):
            raise self._wrong(number, line, f"the bracket ({bracket.label or ''}) is empty")
        closed: Node | Leaf
        closed = Leaf(bracket.label, bracket.word) if bracket.word else Node(bracket.label, tuple(bracket.children))
        if self._open:
            self._open[-1].children.append(closed)
            return None
        if isinstance(closed, Leaf):
            raise self._wrong(number, line, f"the word {closed.word!r} is not a tree; write (ROOT (TAG word))")
        return closed

    def _wrong(self, number: int, line: str, what: str) -> DataError:
        began = f" (the tree begins in line {self._began})" if self._open and self._began != number else ""
        return DataError(f"{self._name}: line {number}{began}: {what}: {_preview(line)}.")


def _preview(text: str) -> str:
    return repr(text if len(text) <= _PREVIEW else text[:_PREVIEW] + "…")


def format_tree(tree: Node | Leaf) -> str:
    """Return a tree as one line with single spaces; `parse_tree` reads it back."""
    if isinstance(tree, Leaf):
        return f"({tree.tag} {tree.word})"
    return " ".join([f"({tree.label}", *map(format_tree, tree.children)]) + ")"


def leaves_of(tree: Node | Leaf) -> list[Leaf]:
    """Return the leaves from left to right."""
    if isinstance(tree, Leaf):
        return [tree]
    return [leaf for child in tree.children for leaf in leaves_of(child)]


def unescape(word: str) -> str:
    """Return a word as plain text: -LRB- and -RRB- become round brackets."""
    return re.sub("-[LR]RB-", lambda found: _ESCAPED[found[0]], word)


def escape(word: str) -> str:
    """Return a word as it is written in a tree: the inverse of `unescape` for words without round brackets."""
    return word.replace("(", "-LRB-").replace(")", "-RRB-")
