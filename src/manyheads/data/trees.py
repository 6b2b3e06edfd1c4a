"""Files of bracketed trees as a source of training pairs: a sentence, and its tree as a line of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.errors import ConfigError, DataError
from manyheads.text.bracketing import normal_form
from manyheads.text.parsing import ParsingTask
from manyheads.text.trees import Leaf, Node, leaves_of, read_trees

__all__ = ["TreeFile", "read_sentences"]


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """The pairs of one split from a file of trees; plain or gzip, each tree on a line or over several.

    Args:
        path: the file; `-` is standard input.
        task: what of the trees is learned.
        subtrees: also give every constituent with at least so many words as a pair of its own; 0 gives none. For
            training alone: a small treebank teaches more when its parts are seen by themselves too.
        on_bad_utf8: `fail`, or `replace` bad bytes by U+FFFD.

    Raises: ConfigError: `skip` (half a tree cannot be left out), or subtrees is negative.
    """

    path: str | Path
    task: ParsingTask
    subtrees: int = 0
    on_bad_utf8: OnBadUtf8 = "fail"

    def __post_init__(self) -> None:
        if self.on_bad_utf8 == "skip":
            raise ConfigError("A line of a tree cannot be skipped; choose --on-bad-utf8 fail or replace.")
        if self.subtrees < 0:
            raise ConfigError(f"subtrees is {self.subtrees}; it must be at least 0 (none).")

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """The pairs in order.

        Raises: DataError: the file cannot be read, or holds what is no tree; its line is named.
        """
        report = report if report is not None else ReadReport()
        for tree in read_tree_file(self.path, self.on_bad_utf8, report, self.task):
            yield self.task.pair(tree)
            if not self.subtrees:
                continue
            words = replace(self.task.settings, tags="keep", functions="keep", root=None)  # all but traces, if need be
            for part in _parts(normal_form(tree, words), self.subtrees):
                report.lines += 1
                yield self.task.pair(part)

    def describe(self) -> str:
        """The file's name, for messages and manifests."""
        more = f" and its constituents of {self.subtrees} words or more" if self.subtrees else ""
        return describe(self.path) + more


def read_tree_file(path: str | Path, on_bad_utf8: OnBadUtf8, report: ReadReport, task: ParsingTask) -> Iterator[Node]:
    """The trees of a file; `report.lines` counts them. Errors as of `TreeFile.read`."""
    name = describe(path)
    for number, tree in read_trees(decoded_lines(path, on_bad_utf8, report), name):
        try:
            task.pair(tree)
        except DataError as error:
            raise DataError(f"{name}: the tree that begins in line {number}: {error}") from None
        report.lines += 1
        yield tree


def read_sentences(path: str | Path, task: ParsingTask, on_bad_utf8: OnBadUtf8 = "fail") -> list[tuple[str, str]]:
    """All sentences of a file with their trees as lines of text. Errors as of `TreeFile`."""
    return list(TreeFile(path=path, task=task, on_bad_utf8=on_bad_utf8).read())


def _parts(tree: Node, least: int) -> Iterator[Node]:
    """Constituents of at least so many words, without the whole sentence; a unary chain gives its uppermost alone."""
    num_words = len(leaves_of(tree))
    waiting: list[tuple[Node | Leaf, int]] = [(tree, num_words)]
    while waiting:
        part, above = waiting.pop()
        if isinstance(part, Leaf):
            continue
        here = len(leaves_of(part))
        if least <= here < above:
            yield part
        if here >= least:
            waiting.extend((child, here) for child in reversed(part.children))
