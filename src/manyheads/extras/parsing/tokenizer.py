"""The tokenizer of a parser, which contains its task, so that both are stored and loaded together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.bracketing import places
from manyheads.extras.parsing.parsing_task import ParsingTask
from manyheads.extras.parsing.trees import parse_tree
from manyheads.text.of_folder import TASK_FILE
from manyheads.text.pipeline import BYTE_PIECES, SPECIAL_PIECES
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import words_of

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.extras.parsing.grammar import TreeGrammar
    from manyheads.text.sides import TranslationTokenizer

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
