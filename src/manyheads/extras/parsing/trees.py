"""Reading and writing of bracketed trees in the format of treebanks.

`(S (NP (PRP She)) (VP (VBZ sleeps)) (. .))`: a bracket contains a label and further brackets, or a part-of-speech tag
and a word. The outermost label may be empty, as in the Penn Treebank's files. Words write round brackets as -LRB- and
-RRB-.

Linearisation of trees for a translation model, and conversion of any output text back into a tree.

Paper: Vinyals et al. 2015, arXiv:1412.7449, sec. 2.2: `(S (NP XX )NP (VP XX )VP XX )S`: opening and closing brackets
carry their labels, and XX stands for each word, whose tag is not predicted. Vaswani et al. 2017, sec. 6.3.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from manyheads.errors import ConfigError, DataError

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

_WRITTEN = re.compile(r"\([^()\s]*|\)[^()\s]*|[^()\s]+", re.ASCII)


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
    for token in _WRITTEN.findall(text):
        if token.startswith("("):
            builder.open(token[1:])
        elif token.startswith(")"):
            builder.close(token[1:])
        else:
            builder.add_word(token)
    return Restored(builder.finish(), builder.repairs)


@dataclass(slots=True)
class _Unfinished:
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
        self._open = [_Unfinished("")]

    def open(self, label: str) -> None:
        outermost = len(self._open) == 1
        if not label and not (outermost and self._settings.root is None):
            self.repairs["unlabelled"] += 1
        elif len(self._open) > MAX_DEPTH:  # the first entry is not a constituent
            self.repairs["too_deep"] += 1
        else:
            self._open.append(_Unfinished(label))

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
            self._open.append(_Unfinished(only.label, list(only.children)))
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
