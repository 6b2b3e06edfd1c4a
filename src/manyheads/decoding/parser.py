"""Constituency parsing of sentences: a translator whose targets are trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, Unpack, overload

import torch

from manyheads.decoding.device import Precision
from manyheads.decoding.settings import DecodingOverrides
from manyheads.decoding.translator import Translator
from manyheads.errors import RequestError
from manyheads.text.bracketing import Restored
from manyheads.text.parsing import ParsingTask, words_of
from manyheads.text.parsing_tokenizer import ParsingTokenizer

__all__ = ["Parser", "task_of"]


def task_of(translator: Translator) -> ParsingTask | None:
    """Return the parsing task of the model; None if it translates."""
    tokenizer = translator.tokenizer
    return tokenizer.task if isinstance(tokenizer, ParsingTokenizer) else None


class Parser:
    """A model that parses tokenised sentences (Vaswani et al. 2017, sec. 6.3).

    Args: translator: of a model that was trained on trees; the search uses its settings.

    Raises: RequestError: the model is not a parser.
    """

    def __init__(self, translator: Translator) -> None:
        task = task_of(translator)
        if task is None:
            raise RequestError("This model cannot parse, because it was not trained on trees.")
        self.translator = translator
        self.task = task

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | Sequence[str | Path],
        device: str = "auto",
        precision: Precision = "fp32",
        *,
        compile_steps: bool = False,
    ) -> Self:
        """Load a parser from a model folder, a run folder or `owner/name` on the Hugging Face hub; see `Translator`."""
        return cls(Translator.from_pretrained(path, device, precision, compile_steps=compile_steps))

    def __repr__(self) -> str:
        return f"Parser({self.translator!r})"

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device; see `Translator.to`. Returns: this parser."""
        self.translator.to(device)
        return self

    def save_pretrained(self, path: str | Path) -> None:
        """Write a model folder; see `Translator.save_pretrained`."""
        self.translator.save_pretrained(path)

    @overload
    def parse(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self, sentences: str, *, stop: Callable[[], bool] | None = None, **overrides: Unpack[DecodingOverrides]
    ) -> Restored | None: ...
    @overload
    def parse(
        self,
        sentences: Sequence[str],
        *,
        stop: Callable[[], bool] | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[Restored | None]: ...
    def parse(
        self,
        sentences: str | Sequence[str],
        *,
        stop: Callable[[], bool] | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> Restored | list[Restored | None] | None:
        """Return the tree of each sentence over exactly its words, with the number of repairs; None for a sentence
        without words. One tree for a string.

        Args: sentences: words separated by spaces; others, and errors, as for `Translator.translate`.
        """
        if isinstance(sentences, str):
            return self.parse([sentences], stop=stop, **overrides)[0]
        written = self.translator.translate(list(sentences), stop=stop, **overrides)
        pairs = zip(sentences, written, strict=True)
        return [self.task.restore(sentence, text) if words_of(sentence) else None for sentence, text in pairs]

    __call__ = parse
