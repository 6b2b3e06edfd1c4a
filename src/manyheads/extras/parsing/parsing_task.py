"""Parsing as a task: what is learned of a tree, and pairs of a sentence and its tree from files of bracketed trees.

The manifest of a prepared folder and task.json of a model folder record that the task is parsing, so that `evaluate`
and `translate` treat targets as trees.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.config.build import build
from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.bracketing import ParsingSettings, Restored, linearise, normal_form, restore, sentence_of
from manyheads.extras.parsing.trees import Node, format_tree, leaves_of, parse_tree, read_trees
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import words_of

if TYPE_CHECKING:
    from manyheads.text.learning import Progress
    from manyheads.text.settings import TokenizerSettings


@dataclass(frozen=True)
class ParsingTask:
    """Conversion between sentences and trees. settings: the parts of a tree that are learned."""

    settings: ParsingSettings = dataclasses.field(default_factory=ParsingSettings)

    def pair(self, tree: Node) -> tuple[str, str]:
        """Return a sentence and its complete tree as lines of text.

        Raises: DataError: the tree has no words or is too deep, so that `target` would fail.
        """
        return sentence_of(normal_form(tree, self.settings)), format_tree(tree)

    def target(self, tree: str) -> str:
        """Return the model's target text for a tree.

        Raises: DataError: the text is not a tree.
        """
        return linearise(parse_tree(tree, "A target"), self.settings)

    def restore(self, sentence: str, written: str) -> Restored:
        """Return the tree in the model's output, over the sentence's words."""
        return restore(written, words_of(sentence), self.settings)

    def learn_tokenizer(
        self,
        pairs: Iterable[tuple[str, str]],
        settings: TokenizerSettings,
        on_progress: Progress = lambda phase, done, total: None,
    ) -> Tokenizer:
        """Train a tokenizer: its pieces come from the sentences, its symbols from the targets of the trees.

        Args: pairs: sentences and trees. on_progress: see `learn_pieces`.
        """
        counts: Counter[str] = Counter()
        sentences = []
        for sentence, tree in pairs:
            sentences.append(sentence)
            counts.update(self.target(tree).split(" "))
        symbols = sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
        return Tokenizer.train(sentences, settings, symbols=symbols, on_progress=on_progress)

    def to_json(self) -> dict[str, Any]:
        """Return the record for a folder."""
        return {"name": "parsing", **dataclasses.asdict(self.settings)}

    @classmethod
    def from_json(cls, content: dict[str, Any], where: str) -> ParsingTask:
        """Read the record that `to_json` wrote.

        Raises: DataError: a setting is unknown or has no such value.
        """
        try:
            return cls(build(ParsingSettings, {key: content[key] for key in content if key != "name"}, where))
        except ConfigError as error:
            raise DataError(str(error)) from None


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
