"""Trees as sequences that a translation model can write, and back again, whatever it wrote.

Paper: Vinyals et al. 2015, arXiv:1412.7449, sec. 2.2: `(S (NP XX )NP (VP XX )VP XX )S`, opening brackets with their
labels, closing brackets with theirs, and XX for each word, whose tag is not predicted. Vaswani et al. 2017, sec. 6.3.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from manyheads.errors import DataError
from manyheads.text.settings import ParsingSettings
from manyheads.text.trees import MAX_DEPTH, Leaf, Node, escape, leaves_of, unescape

__all__ = ["REPAIRS", "SLOT", "Restored", "category", "linearise", "normal_form", "places", "restore", "sentence_of"]

SLOT = "XX"
TRACE = "-NONE-"
OUTER_LABELS = ("", "ROOT", "TOP", "S1")
"""Labels of a root that stands for no constituent; the empty one is the Penn Treebank's."""

REPAIRS = {
    "unclosed": "brackets closed, because a bracket around them was, or the text ended",
    "unopened": "closing brackets left out, because nothing fitting was open",
    "mislabelled": "closing brackets with another label than the one they close",
    "unlabelled": "brackets left out for want of a label",
    "empty": "constituents left out for want of a word",
    "too_deep": f"brackets left out, because {MAX_DEPTH} were open",
    "missing_words": "words added at the end",
    "extra_words": "places for words left out, because there were no more",
    "no_root": "sentences put under one root, because they were not one constituent",
}
"""What `restore` counts."""

_TOKEN = re.compile(r"\([^()\s]*|\)[^()\s]*|[^()\s]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Restored:
    """A tree over the words of a sentence. repairs: how often each of REPAIRS was needed; none if well-formed."""

    tree: Node
    repairs: Counter[str]


def category(label: str) -> str:
    """A label without functions and indices: `NP-SBJ=2` -> `NP`; labels that begin with a sign stay (`-LRB-`)."""
    return label if label[:1] in ("-", "=") else re.split("[-=]", label, maxsplit=1)[0]


def sentence_of(tree: Node) -> str:
    """The words as people write them, joined by spaces."""
    return " ".join(unescape(leaf.word) for leaf in leaves_of(tree))


def normal_form(tree: Node, settings: ParsingSettings) -> Node:
    """The tree as far as the settings keep it: without traces, functions, tags and its own root, or with them.

    Raises: DataError: it holds nothing but traces, or is nested more than MAX_DEPTH deep.
    """
    if settings.root is not None:
        children = tree.children if tree.label in OUTER_LABELS else (tree,)
        tree = Node(settings.root, children)
    kept = _kept(tree, settings, 1)
    if kept is None:
        raise DataError("The tree holds no word, only traces.")
    if isinstance(kept, Leaf):
        raise TypeError("a constituent stays a constituent")
    return kept


def _kept(part: Node | Leaf, settings: ParsingSettings, depth: int) -> Node | Leaf | None:
    if isinstance(part, Leaf):
        if settings.traces == "strip" and part.tag == TRACE:
            return None
        return part if settings.tags == "keep" else Leaf(SLOT, part.word)
    if depth > MAX_DEPTH:
        raise DataError(f"The tree is nested more than {MAX_DEPTH} deep.")
    children = []
    for child in part.children:
        kept = _kept(child, settings, depth + 1)
        if kept is not None:
            children.append(kept)
    label = category(part.label) if settings.functions == "strip" else part.label
    return Node(label, tuple(children)) if children else None


def linearise(tree: Node, settings: ParsingSettings) -> str:
    """The tree's normal form as tokens joined by spaces, with XX or the tag in the place of each word.

    The root of the settings is left out where `restore` can know that it was there: over a single constituent.
    """
    return " ".join(token for token, _ in places(tree, settings))


def places(tree: Node, settings: ParsingSettings) -> list[tuple[str, str | None]]:
    """The tokens of `linearise`; beside one that is the place of a word that word, as people write it, else None."""
    tree = normal_form(tree, settings)
    if settings.root is not None and len(tree.children) == 1:
        only = tree.children[0]
        if isinstance(only, Node) and only.label != settings.root:
            tree = only
    tokens: list[tuple[str, str | None]] = []
    _write(tree, tokens)
    return tokens


def _write(part: Node | Leaf, tokens: list[tuple[str, str | None]]) -> None:
    if isinstance(part, Leaf):
        tokens.append((part.tag, unescape(part.word)))
        return
    tokens.append((f"({part.label}", None))
    for child in part.children:
        _write(child, tokens)
    tokens.append((f"){part.label}", None))


def restore(text: str, words: Sequence[str], settings: ParsingSettings, tags: Sequence[str] | None = None) -> Restored:
    """A tree over exactly these words from any text at all; what had to be mended is counted.

    Args:
        text: what `linearise` gave, or what a model wrote.
        words: of the sentence, as people write them; at least one, none with white space in it.
        settings: those of `linearise`.
        tags: of the words, if they are known; otherwise each is what the text has in its place.

    Raises: DataError: there is no word.
    """
    if not words:
        raise DataError("A tree needs at least one word.")
    builder = _Builder(words, settings, tags)
    for token in _TOKEN.findall(text):
        if token.startswith("("):
            builder.open(token[1:])
        elif token.startswith(")"):
            builder.close(token[1:])
        else:
            builder.add_word(token)
    return Restored(builder.finish(), builder.repairs)


@dataclass(slots=True)
class _Open:
    label: str
    children: list[Node | Leaf] = field(default_factory=list)


class _Builder:
    """Brackets that are open; the first is none of the text's, but holds what stands outside of all brackets."""

    def __init__(self, words: Sequence[str], settings: ParsingSettings, tags: Sequence[str] | None) -> None:
        self.repairs: Counter[str] = Counter()
        self._words = words
        self._settings = settings
        self._tags = tags
        self._done = 0
        self._open = [_Open("")]

    def open(self, label: str) -> None:
        """An opening bracket."""
        outermost = len(self._open) == 1
        if not label and not (outermost and self._settings.root is None):
            self.repairs["unlabelled"] += 1
        elif len(self._open) > MAX_DEPTH:  # the first is no constituent
            self.repairs["too_deep"] += 1
        else:
            self._open.append(_Open(label))

    def close(self, label: str) -> None:
        """A closing bracket: of the innermost constituent with that label; if there is none, of the innermost.

        But the outermost constituent is not closed by a label that is not its own: more of the sentence may follow.
        """
        inside = [bracket.label for bracket in self._open[1:]]
        if label in inside:
            while self._open[-1].label != label:
                self.repairs["unclosed"] += 1
                self._pop()
            self._pop()
        elif len(inside) > 1:
            self.repairs["mislabelled"] += 1
            self._pop()
        else:
            self.repairs["unopened"] += 1

    def add_word(self, tag: str) -> None:
        """The place of the next word."""
        if self._done == len(self._words):
            self.repairs["extra_words"] += 1
            return
        if self._tags is not None:
            tag = self._tags[self._done]
        elif self._settings.tags == "XX":
            tag = SLOT
        self._open[-1].children.append(Leaf(tag, escape(self._words[self._done])))
        self._done += 1

    def _pop(self) -> None:
        bracket = self._open.pop()
        if bracket.children:
            self._open[-1].children.append(Node(bracket.label, tuple(bracket.children)))
        else:
            self.repairs["empty"] += 1

    def finish(self) -> Node:
        """The tree. Words that are left go to the end of the outermost constituent."""
        missing = len(self._words) - self._done
        while len(self._open) > (2 if missing else 1):
            self.repairs["unclosed"] += 1
            self._pop()
        top = self._open[0].children
        too_early = False
        if missing and len(self._open) == len(top) == 1 and isinstance(only := top[0], Node):
            too_early = True
            top.clear()
            self._open.append(_Open(only.label, list(only.children)))
        for _ in range(missing):
            self.add_word(SLOT)
            self.repairs["missing_words"] += 1
        if len(self._open) > 1:
            if not too_early:
                self.repairs["unclosed"] += 1
            self._pop()
        return self._rooted(top)

    def _rooted(self, children: list[Node | Leaf]) -> Node:
        root = self._settings.root
        if len(children) == 1 and isinstance(children[0], Node):
            only = children[0]
            return only if root is None or only.label == root else Node(root, (only,))
        self.repairs["no_root"] += 1
        for place in range(len(children) - 1, -1, -1):  # no label is fine on top only
            if isinstance(part := children[place], Node) and not part.label:
                self.repairs["unlabelled"] += 1
                children[place : place + 1] = part.children
        return Node(OUTER_LABELS[1] if root is None else root, tuple(children))
