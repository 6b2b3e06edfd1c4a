"""The tokenizer of a parser: one that knows its task, so that both are kept, found and passed on together."""

from __future__ import annotations

import json
from collections.abc import Sequence

from manyheads.errors import DataError
from manyheads.text.parsing import TASK_FILE, ParsingTask
from manyheads.text.tokenizer import Tokenizer

__all__ = ["ParsingTokenizer"]


class ParsingTokenizer(Tokenizer):
    """A tokenizer with symbols for brackets. Its target side reads trees; what it gives is what the model wrote.

    Args:
        tokenizer: with symbols.
        task: what trees become.

    Raises: ConfigError: the tokenizer has no symbols for brackets.
    """

    def __init__(self, tokenizer: Tokenizer, task: ParsingTask) -> None:
        task.check_tokenizer(tokenizer)
        vars(self).update(vars(tokenizer))
        self.task = task

    @property
    def target(self) -> Tokenizer:
        """The side that writes targets."""
        return _TreeSide(self)

    def describe(self) -> dict[str, object]:
        """What people may want to know."""
        return {**super().describe(), "task": self.task.to_json()}

    def files(self) -> dict[str, bytes]:
        """tokenizer.json and task.json."""
        task = json.dumps(self.task.to_json(), indent=2) + "\n"
        return {**super().files(), TASK_FILE: task.encode()}


class _TreeSide(ParsingTokenizer):
    """Encodes trees, and what the model writes for them."""

    def __init__(self, whole: ParsingTokenizer) -> None:
        vars(self).update(vars(whole))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_targets([self._written(text) for text in texts])

    def _written(self, text: str) -> str:
        known = set(self.symbols)
        if all(word in known for word in text.split(" ") if word):
            return text  # written by a model, or its beginning; no tree looks like that
        try:
            return self.task.target(text)
        except DataError as error:
            raise DataError(f"The target of a parser is a tree, or what it writes for one. {error}") from None
