"""Parsing as a translation task: source and target text of a tree, and the record of the task in a folder.

The manifest of a prepared folder and task.json of a model folder record that the task is parsing, so that `evaluate`
and `translate` treat targets as trees.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from manyheads.config.build import build
from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.bracketing import Restored, linearise, normal_form, restore, sentence_of
from manyheads.extras.parsing.trees import Node, format_tree, parse_tree
from manyheads.text.learning import Told
from manyheads.text.settings import ParsingSettings, TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import words_of

__all__ = ["ParsingTask"]


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

    def text(self, sentence: str, written: str) -> str:
        """Return `restore` as a line of text; empty for a sentence without words."""
        return format_tree(self.restore(sentence, written).tree) if words_of(sentence) else ""

    def learn_tokenizer(
        self,
        pairs: Iterable[tuple[str, str]],
        settings: TokenizerSettings,
        told: Told = lambda phase, done, total: None,
    ) -> Tokenizer:
        """Train a tokenizer: its pieces come from the sentences, its symbols from the targets of the trees.

        Args: pairs: sentences and trees. told: progress, see `learn_pieces`.
        """
        counts: Counter[str] = Counter()
        sentences = []
        for sentence, tree in pairs:
            sentences.append(sentence)
            counts.update(self.target(tree).split(" "))
        symbols = sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
        return Tokenizer.train(sentences, settings, symbols=symbols, told=told)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises: ConfigError: the tokenizer has no pieces for brackets."""
        if not any(symbol.startswith("(") for symbol in tokenizer.symbols):
            raise ConfigError(
                "This tokenizer has no symbols for the brackets of trees; train a new one, or give that of a parser."
            )

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
