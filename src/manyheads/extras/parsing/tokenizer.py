"""Parsing as a task: what is learned of a tree, and pairs of a sentence and its tree from files of bracketed trees.

The manifest of a prepared folder and task.json of a model folder record that the task is parsing, so that `evaluate`
and `translate` treat targets as trees.

The tokenizer of a parser, which contains its task, so that both are stored and loaded together.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from manyheads.config.build import build
from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.trees import (
    Node,
    ParsingSettings,
    Restored,
    format_tree,
    leaves_of,
    linearise,
    normal_form,
    parse_tree,
    places,
    read_trees,
    restore,
    sentence_of,
)
from manyheads.text.of_folder import TASK_FILE
from manyheads.text.pipeline import BYTE_PIECES, SPECIAL_PIECES
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import words_of

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.extras.parsing.grammar import TreeGrammar
    from manyheads.text.learning import Progress
    from manyheads.text.settings import TokenizerSettings
    from manyheads.text.sides import TranslationTokenizer


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


_SPACE_BYTE = BYTE_PIECES[ord(" ")]


class ParsingTokenizer(Tokenizer):
    """A tokenizer with symbols for brackets. Its target side encodes trees and decodes the model's output.

    Sentences are words with any white space between them. No piece of a word is a symbol, so in a target that contains
    words (`ParsingSettings.words`) pieces and symbols cannot be confused.

    Args:
        tokenizer: a tokenizer with symbols.
        task: the conversion of trees.

    Raises: ConfigError: the tokenizer has no symbols for brackets.
    """

    model_kind = "parser"
    splits_lines = False

    def __init__(self, tokenizer: Tokenizer, task: ParsingTask) -> None:
        if not any(symbol.startswith("(") for symbol in tokenizer.symbols):
            raise ConfigError(
                "This tokenizer has no symbols for the brackets of trees; train a new one, or give that of a parser."
            )
        vars(self).update(vars(tokenizer))
        self.task = task

    @classmethod
    def of_record(cls, tokenizer: Tokenizer, record: dict[str, Any], where: str) -> ParsingTokenizer:
        """See `catalogue.Task.tokenizer`. Raises: DataError: see `ParsingTask.from_json`."""
        return cls(tokenizer, ParsingTask.from_json(record, where))

    @property
    def target(self) -> Tokenizer:
        """The side for targets."""
        return _TreeSide(self)

    @property
    def num_target_ids(self) -> int:
        """Upper bound (exclusive) of the ids in targets."""
        return self.vocab_size if self.task.settings.words == "write" else super().num_target_ids

    def describe(self) -> dict[str, object]:
        """Return the properties to show to users."""
        return {**super().describe(), "task": self.task.to_json()}

    def files(self) -> dict[str, bytes]:
        """Return tokenizer.json and task.json."""
        task = json.dumps(self.task.to_json(), indent=2) + "\n"
        return {**super().files(), TASK_FILE: task.encode()}

    def grammar(self, settings: DecodingSettings) -> TreeGrammar | None:
        """Trees over the words of the sentence, if the settings say so."""
        from manyheads.extras.parsing.grammar import TreeGrammar  # imports torch, which preparing data does not need

        return TreeGrammar(self, self.task.settings, self.begins_word()) if settings.well_formed else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of sentences. Raises: DataError: a text contains an unpaired surrogate."""
        lists = super().encode_batch([" ".join(words_of(text)) for text in texts])
        return [[piece for index in ids for piece in self._spelled(index)] for ids in lists]

    def encode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """See `Tokenizer.encode_many`. A tree is one part, and a word means something else in it than in a sentence."""
        lists = self.encode_batch(texts)
        return np.fromiter(chain.from_iterable(lists), np.int32), np.array([*map(len, lists)], np.int64)

    def _spelled(self, index: int) -> Sequence[int]:
        """Return the byte encoding of a word that is spelled like a symbol, such as the tag NN."""
        if index not in self.symbol_ids:
            return (index,)
        if self.kind == "word":
            return (self.unk_id,)
        return [len(SPECIAL_PIECES) + byte for byte in self._pieces[index].encode()]

    def begins_word(self) -> list[bool]:
        """Return for each id whether it is the first piece of a word in a sentence."""
        if self.kind == "word":
            return [True] * self.vocab_size
        return [piece.startswith(" ") or piece == _SPACE_BYTE for piece in self._pieces]


class _TreeSide(ParsingTokenizer):
    """Encodes trees and the model's outputs for trees."""

    def __init__(self, whole: ParsingTokenizer) -> None:
        vars(self).update(vars(whole))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        known = set(self.symbols)
        results = []
        for text in texts:
            if all(word in known for word in text.split(" ") if word):
                results.append(self.encode_targets([text])[0])  # the output of a model, or a prefix of it
            else:
                results.append(self._encode_tree(text))
        return results

    def _encode_tree(self, text: str) -> list[int]:
        settings = self.task.settings
        try:
            steps = places(parse_tree(text, "A target"), settings)
        except DataError as error:
            raise DataError(f"The target of a parser must be a tree, or a model's output for one. {error}") from None
        tokens = self.encode_targets([token for token, _ in steps])
        if settings.words == "write":
            words = iter(ParsingTokenizer.encode_batch(self, [word for _, word in steps if word is not None]))
            tokens = [ids if word is None else ids + next(words) for ids, (_, word) in zip(tokens, steps, strict=True)]
        return [index for ids in tokens for index in ids]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Return brackets and tags, without the pieces of words between them."""
        if self.task.settings.words == "write":
            batch = [[index for index in self._checked(ids) if index in self.symbol_ids] for ids in batch]
        return super().decode_batch(batch)


def task_of(tokenizer: TranslationTokenizer) -> ParsingTask | None:
    """Return the parsing task of a tokenizer; None: it is for translation."""
    return tokenizer.task if isinstance(tokenizer, ParsingTokenizer) else None
