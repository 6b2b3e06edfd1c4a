"""Files of bracketed trees as a source of training pairs: a sentence, and its tree as one line of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.bracketing import normal_form
from manyheads.extras.parsing.parsing_text import ParsingTask
from manyheads.extras.parsing.trees import Node, leaves_of, read_trees

__all__ = ["TreeFile", "read_sentences"]


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """The pairs of one split from a file of trees, plain or gzip; a tree can span several lines.

    Args:
        path: the file; `-` is standard input.
        task: the parts of the trees that are learned.
        subtrees: also yield every constituent with at least this number of words as a pair of its own; 0: none. For
            training only: a model learns more from a small treebank if it also sees parts of the sentences.
        on_bad_utf8: `fail`, or `replace` bad bytes by U+FFFD.

    Raises: ConfigError: on_bad_utf8 is `skip` (half a tree cannot be left out), or subtrees is negative.
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
        """Yield the pairs in order.

        Raises: DataError: the file cannot be read, or contains text that is not a tree; the message names its line.
        """
        report = report if report is not None else ReadReport()
        for tree in read_tree_file(self.path, self.on_bad_utf8, report, self.task):
            yield self.task.pair(tree)
            if not self.subtrees:
                continue
            words = replace(
                self.task.settings, tags="keep", functions="keep", root=None
            )  # only traces are removed, if the task says so
            for part in _parts(normal_form(tree, words), self.subtrees):
                report.lines += 1
                yield self.task.pair(part)

    def describe(self) -> str:
        """Return the name of the file, for messages and manifests."""
        more = f" and its constituents of {self.subtrees} words or more" if self.subtrees else ""
        return describe(self.path) + more


def read_tree_file(path: str | Path, on_bad_utf8: OnBadUtf8, report: ReadReport, task: ParsingTask) -> Iterator[Node]:
    """Yield the trees of a file; `report.lines` counts them. For errors see `TreeFile.read`."""
    name = describe(path)
    for number, tree in read_trees(decoded_lines(path, on_bad_utf8, report), name):
        try:
            task.pair(tree)
        except DataError as error:
            raise DataError(f"{name}: the tree that begins in line {number}: {error}") from None
        report.lines += 1
        yield tree


def read_sentences(
    path: str | Path, task: ParsingTask, on_bad_utf8: OnBadUtf8 = "fail", report: ReadReport | None = None
) -> list[tuple[str, str]]:
    """Return all sentences of a file, with their trees as lines of text. For errors see `TreeFile`."""
    return list(TreeFile(path=path, task=task, on_bad_utf8=on_bad_utf8).read(report))


def _parts(tree: Node, least: int) -> Iterator[Node]:
    """Yield the constituents below `tree` with at least `least` words; of a unary chain only the uppermost one."""
    num_words = len(leaves_of(tree))
    for child in tree.children:
        num_inside = len(leaves_of(child))
        if isinstance(child, Node) and num_inside >= least:
            if num_inside < num_words:
                yield child
            yield from _parts(child, least)
