"""Constituency parsing of sentences, by a translator whose targets are trees or by a chart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, Unpack, overload

import torch

from manyheads.decoding.device import Precision
from manyheads.decoding.settings import DecodingOverrides
from manyheads.decoding.text_ids import check_texts
from manyheads.decoding.translator import Translator
from manyheads.errors import RequestError
from manyheads.extras.parsing.bracketing import Restored
from manyheads.extras.parsing.chart_parser import ChartParser, holds_chart_parser
from manyheads.extras.parsing.parsing_task import ParsingTask
from manyheads.extras.parsing.tokenizer import task_of
from manyheads.text.words import words_of

__all__ = ["Parser"]


class Parser:
    """A model that parses tokenised sentences.

        parser = Parser.from_pretrained("runs/gum-chart-parsing")
        print(format_tree(parser("She sleeps .").tree))

    There are two kinds: a translator whose targets are trees (Vaswani et al. 2017, sec. 6.3), and a chart parser
    (Kitaev and Klein 2018).

    Args: model: a `Translator` of a model that was trained on trees, whose settings the search uses, or a
        `ChartParser`.

    Raises: RequestError: the model is not a parser.
    """

    def __init__(self, model: Translator | ChartParser) -> None:
        self.model = model
        self._task = None if isinstance(model, ChartParser) else task_of(model.tokenizer)
        if self._task is None and not isinstance(model, ChartParser):
            raise RequestError("This model cannot parse, because it was not trained on trees.")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | Sequence[str | Path],
        device: str = "auto",
        precision: Precision = "fp32",
        *,
        compile_steps: bool = False,
    ) -> Self:
        """Load a parser from a model folder, a run folder or `owner/name` on the Hugging Face hub.

        Args: see `Translator`; several paths are an ensemble of parsers of one kind.

        Raises: as `Translator.from_pretrained`. RequestError: steps of a chart parser, which has none, are to be
            compiled.
        """
        first = path if isinstance(path, str | Path) else next(iter(path), None)
        if first is None or not holds_chart_parser(first):
            return cls(Translator.from_pretrained(path, device, precision, compile_steps=compile_steps))
        if compile_steps:
            raise RequestError("A chart parser has no steps of a search to compile; leave out compile_steps.")
        return cls(ChartParser.from_pretrained(path, device, precision))

    def __repr__(self) -> str:
        return f"Parser({self.model!r})"

    @property
    def translator(self) -> Translator:
        """The translator. Raises: RequestError: this is a chart parser."""
        if isinstance(self.model, ChartParser):
            raise RequestError("This model parses by a chart; it has no search over text.")
        return self.model

    @property
    def chart(self) -> ChartParser:
        """The chart parser. Raises: RequestError: this is a translator of trees."""
        if not isinstance(self.model, ChartParser):
            raise RequestError("This model writes trees as text; it has no chart.")
        return self.model

    @property
    def task(self) -> ParsingTask:
        """The conversion of trees and text. Raises: RequestError: this is a chart parser."""
        if self._task is None:
            raise RequestError("This model parses by a chart; it writes no trees as text.")
        return self._task

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device; see `Translator.to`. Returns: this parser."""
        self.model.to(device)
        return self

    def save_pretrained(self, path: str | Path) -> None:
        """Write a model folder; see `Translator.save_pretrained`."""
        self.model.save_pretrained(path)

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

        Args: sentences: words separated by spaces; others, and errors, as for `Translator.translate`. A chart parser
            takes no options of a search, and its trees need no repair.
        """
        if isinstance(sentences, str):
            return self.parse([sentences], stop=stop, **overrides)[0]
        check_texts(sentences, "sentence")
        if isinstance(self.model, ChartParser):
            if overrides:
                raise RequestError(f"A chart parser does not search over text; leave out {', '.join(overrides)}.")
            trees = self.model.parse(list(sentences), stop=stop)
            return [None if tree is None else Restored(tree, Counter()) for tree in trees]
        written = self.translator.translate(list(sentences), stop=stop, **overrides)
        pairs = zip(sentences, written, strict=True)
        return [self.task.restore(sentence, text) if words_of(sentence) else None for sentence, text in pairs]

    __call__ = parse
