"""Linearisation of trees for a translation model, and conversion of any output text back into a tree.

Paper: Vinyals et al. 2015, arXiv:1412.7449, sec. 2.2: `(S (NP XX )NP (VP XX )VP XX )S`: opening and closing brackets
carry their labels, and XX stands for each word, whose tag is not predicted. Vaswani et al. 2017, sec. 6.3.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.trees import MAX_DEPTH, Leaf, Node, escape, leaves_of, unescape

SLOT = "XX"
TRACE = "-NONE-"
OUTER_LABELS = ("", "ROOT", "TOP", "S1")
"""Labels of a root that stands for no constituent; the empty one is the Penn Treebank's."""

REPAIRS = {
    "unclosed": "brackets closed, because an outer bracket was closed, or the text ended",
    "unopened": "closing brackets left out, because no matching bracket was open",
    "mislabelled": "closing brackets whose label differs from the opening bracket's",
    "unlabelled": "brackets left out, because they had no label",
    "empty": "constituents left out, because they had no word",
    "too_deep": f"brackets left out, because {MAX_DEPTH} were open",
    "missing_words": "words added at the end",
    "extra_words": "word positions left out, because there were no more words",
    "no_root": "sentences put under one root, because they were not one constituent",
}
"""The repairs that `restore` counts."""

_TOKEN = re.compile(r"\([^()\s]*|\)[^()\s]*|[^()\s]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ParsingSettings:
    """The parts of a tree that a parser learns (Vinyals et al. 2015, arXiv:1412.7449). The defaults are the paper's.

    Args:
        tags: parts of speech: `XX` for all of them, or `keep`.
        words: the tokens for a word: only its tag (`leave`), or the tag followed by the word's subwords (`write`),
            which tell the decoder its position in the sentence.
        functions: the part of a label after - or = (`NP-SBJ`): `strip` or `keep`.
        traces: leaves tagged -NONE-, which are not words: `strip` (also constituents without other leaves) or `keep`.
        root: the label at the top of every tree. It is not a constituent and not written; roots named ROOT, TOP, S1 or
            empty in a file are replaced by it. None: there is no root, and trees stay unchanged.

    Raises: ConfigError: root is not a valid label.
    """

    tags: Literal["XX", "keep"] = "XX"
    words: Literal["leave", "write"] = "leave"
    functions: Literal["strip", "keep"] = "strip"
    traces: Literal["strip", "keep"] = "strip"
    root: str | None = "ROOT"

    def __post_init__(self) -> None:
        if self.root is not None and (not self.root or any(char in "() \t\n\r\v\f" for char in self.root)):
            raise ConfigError(
                f"root is {self.root!r}; a label has no brackets or spaces and is not empty.", fields=["root"]
            )


@dataclass(frozen=True, slots=True)
class Restored:
    """A tree over the words of a sentence. repairs: number of repairs of each kind in REPAIRS; can be empty."""

    tree: Node
    repairs: Counter[str]


def category(label: str) -> str:
    """Return a label without functions and indices: `NP-SBJ=2` -> `NP`; a label that begins with a sign is kept."""
    return label if label[:1] in ("-", "=") else re.split("[-=]", label, maxsplit=1)[0]


def sentence_of(tree: Node) -> str:
    """Return the words as plain text, joined by spaces."""
    return " ".join(unescape(leaf.word) for leaf in leaves_of(tree))


def normal_form(tree: Node, settings: ParsingSettings) -> Node:
    """Return the tree with only the parts that the settings keep: traces, functions, tags and the root are optional.

    Raises: DataError: the tree contains only traces, or is nested more than MAX_DEPTH deep.
    """
    if settings.root is not None:
        children = tree.children if tree.label in (*OUTER_LABELS, settings.root) else (tree,)
        tree = Node(settings.root, children)
    kept = _kept(tree, settings, 1)
    if kept is None:
        raise DataError("The tree has no words, only traces.")
    assert isinstance(kept, Node)
    return kept


def _kept(part: Node | Leaf, settings: ParsingSettings, depth: int) -> Node | Leaf | None:
    if isinstance(part, Leaf):
        if settings.traces == "strip" and part.tag == TRACE:
            return None
        return part if settings.tags == "keep" else Leaf(SLOT, part.word)
    if depth > MAX_DEPTH:
        raise DataError(f"The tree is nested more than {MAX_DEPTH} deep.")
    children = [kept for child in part.children if (kept := _kept(child, settings, depth + 1)) is not None]
    label = category(part.label) if settings.functions == "strip" else part.label
    return Node(label, tuple(children)) if children else None


def linearise(tree: Node, settings: ParsingSettings) -> str:
    """Return the tree's normal form as tokens joined by spaces, with XX or the tag in place of each word.

    The root named in the settings is left out above a single constituent, because `restore` can add it again.
    """
    return " ".join(token for token, _ in places(tree, settings))


def places(tree: Node, settings: ParsingSettings) -> list[tuple[str, str | None]]:
    """Return the tokens of `linearise`, each with the word for which it stands, in plain text, or None."""
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
    """Build a tree over exactly the given words from any text, and count the repairs.

    Args:
        text: the output of `linearise` or of a model.
        words: the words of the sentence as plain text; at least one, without white space inside.
        settings: the settings used for `linearise`.
        tags: the tags of the words, if known; otherwise the text gives each tag.

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
    """A stack of open brackets. The first entry is not a bracket of the text; it collects what is outside brackets."""

    def __init__(self, words: Sequence[str], settings: ParsingSettings, tags: Sequence[str] | None) -> None:
        self.repairs: Counter[str] = Counter()
        self._words = words
        self._settings = settings
        self._tags = tags
        self._done = 0
        self._open = [_Open("")]

    def open(self, label: str) -> None:
        outermost = len(self._open) == 1
        if not label and not (outermost and self._settings.root is None):
            self.repairs["unlabelled"] += 1
        elif len(self._open) > MAX_DEPTH:  # the first entry is not a constituent
            self.repairs["too_deep"] += 1
        else:
            self._open.append(_Open(label))

    def close(self, label: str) -> None:
        """Close the innermost constituent with that label, or the innermost constituent if no label matches.

        A label that differs from its own does not close the outermost constituent, because the sentence may continue.
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
        """Add the next word."""
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
        """Return the tree. Words that are left are added at the end of the outermost constituent."""
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
        for place in range(len(children) - 1, -1, -1):  # only the outermost label may be empty
            if isinstance(part := children[place], Node) and not part.label:
                self.repairs["unlabelled"] += 1
                children[place : place + 1] = part.children
        return Node(OUTER_LABELS[1] if root is None else root, tuple(children))


def repairs_line(repairs: Mapping[str, int]) -> str:
    """`unclosed 3, missing words 12`."""
    return ", ".join(f"{name.replace('_', ' ')} {repairs[name]}" for name in REPAIRS if repairs.get(name)) or "nothing"
