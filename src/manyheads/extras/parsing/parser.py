"""Constituency parsing of sentences, by a chart over scores of spans or by a translator whose targets are trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack, overload

import torch
from torch import Tensor

from manyheads.catalogue import ARCHITECTURES
from manyheads.decoding.inputs_and_results import check_texts
from manyheads.decoding.translator import Translator
from manyheads.errors import DataError, RequestError, refuse_nan
from manyheads.extras.classification.encoder_with_head import RunsEncoder
from manyheads.extras.parsing.span_data import (
    SpanBatch,
    SpanRow,
    SpanStore,
    affix_hashes,
    eval_spans,
    spans_of,
    tree_of,
    word_pieces,
)
from manyheads.extras.parsing.span_parser import SpanParser, SpanParserEnsemble, best_splits, tree_spans
from manyheads.extras.parsing.span_task.settings import MOST_WORDS
from manyheads.extras.parsing.tokenizer import task_of
from manyheads.extras.parsing.trees import Node, ParsingSettings, Restored, parse_tree
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import read_config
from manyheads.text.words import words_of

if TYPE_CHECKING:
    from manyheads.decoding.model_runner import Precision
    from manyheads.decoding.settings import DecodingOverrides
    from manyheads.extras.parsing.tokenizer import ParsingTask

BATCH_WORDS = 1024
"""Words of a batch, padding included."""


class ChartParser(RunsEncoder[SpanParser | SpanParserEnsemble]):
    """A model that gives each tokenised sentence its constituent tree (Kitaev and Klein 2018, arXiv:1805.01052).

        parser = ChartParser.from_pretrained("runs/gum-chart-parsing")
        parser.parse(["She sleeps ."])[0]  # a Node; None for a sentence without words

    For the arguments see `RunsEncoder`.
    """

    task = "spans"
    ensemble = SpanParserEnsemble

    def __repr__(self) -> str:
        return f"ChartParser({self.model.config.architecture}, {self.device}, {self.precision})"

    @property
    def max_len(self) -> int:
        """Longest sentence in words."""
        longest = self.model.max_len
        return MOST_WORDS if longest is None else min(longest, MOST_WORDS)

    def parse(
        self,
        sentences: Sequence[str],
        *,
        max_tokens: int = BATCH_WORDS,
        first_number: int = 1,
        on_progress: Callable[[int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[Node | None]:
        """Return the tree of each sentence over exactly its words; None for a sentence without words.

        Args:
            sentences: words separated by spaces.
            max_tokens: words of a batch.
            first_number: number of the first sentence in messages.
            on_progress: called after each batch with the number of finished sentences.
            stop: called after each batch; if it returns True, the remaining sentences get no tree.

        Raises: RequestError: a sentence has more words than the model has positions. DataError: a word contains half a
            surrogate pair.
        """
        if isinstance(sentences, str):
            raise RequestError("parse takes a list of sentences; put one sentence into a list.")
        check_texts(sentences, "sentence")
        split = [words_of(sentence) for sentence in sentences]
        self._check_lengths(split, first_number)
        found: list[Node | None] = [None] * len(split)
        places = [place for place, words in enumerate(split) if words]
        if not places:
            return found
        rows = [self._row(words) for words in split if words]
        done = len(split) - len(places)
        with self.runner.inference():
            for batch, parsed in parse_batches(
                self.model, eval_spans(SpanStore.from_rows(rows), max_tokens), self.device
            ):
                for sample, (tags, spans) in zip(batch.sample_ids.tolist(), parsed, strict=True):
                    place = places[sample]
                    found[place] = tree_of(split[place], tags, spans, self.model.config.root)
                done += len(parsed)
                if on_progress is not None:
                    on_progress(done)
                if stop is not None and stop():
                    break
        return found

    __call__ = parse

    def log_probs(
        self, trees: Sequence[str], *, first_number: int = 1, on_progress: Callable[[int], None] | None = None
    ) -> Tensor:
        """Return the log-probability of each tree, as one of its binary forms, and of its tags. (trees,) in float64

        Args: trees: in brackets. first_number, on_progress: as of `parse`.

        Raises: DataError: a text is not a tree, or has a label or a tag that the model does not know. RequestError: a
            sentence has more words than the model has positions.
        """
        config = self.model.config
        labels = {label: number for number, label in enumerate(config.constituents, 1)}
        tags = {tag: number for number, tag in enumerate(config.tags, 1)}
        keeps_functions = any("-" in label[1:] for label in labels)
        parts = ParsingSettings(tags="keep", functions="keep" if keeps_functions else "strip", root=config.root)
        rows = []
        for number, text in enumerate(trees, first_number):
            tree = spans_of(parse_tree(text, f"Tree {number}"), parts)
            for kind, names, known in (("label", [span[2] for span in tree.spans], labels), ("tag", tree.tags, tags)):
                if unknown := [name for name in names if name not in known]:
                    raise DataError(
                        f"Tree {number} has the {kind} {unknown[0]!r}, which no training tree of the model has, so it"
                        " has no probability; leave the tree out."
                    )
            self._check_lengths([tree.words], number)
            spans = [(start, end, labels[label]) for start, end, label in tree.spans]
            rows.append(self._row(tree.words, [tags[tag] for tag in tree.tags], spans))
        found = torch.zeros(len(rows), dtype=torch.float64)
        with self.runner.inference():
            for place, row in enumerate(rows):
                [batch] = eval_spans(SpanStore.from_rows([row]), BATCH_WORDS)
                found[place] = float(self.model.tree_log_prob(batch.to(self.device)))
                if on_progress is not None:
                    on_progress(place + 1)
        refuse_nan(bool(found.isnan().any()))
        return found

    def _check_lengths(self, split: Sequence[Sequence[str]], first_number: int) -> None:
        for number, words in enumerate(split, first_number):
            if len(words) > self.max_len:
                raise RequestError(
                    f"sentence {number} has {len(words):,} words, but the model reads at most {self.max_len}; split it."
                )

    def _row(
        self, words: Sequence[str], tags: Sequence[int] = (), spans: Sequence[tuple[int, int, int]] = ()
    ) -> SpanRow:
        pieces, affixes = word_pieces(words, self.tokenizer), [*map(affix_hashes, words)]
        return SpanRow(pieces, affixes, tags or [0] * len(words), spans)


def holds_chart_parser(path: str | Path) -> bool:
    """Return whether a model or run folder, or a model on the Hugging Face hub, is a chart parser.

    Raises: ModelFileError: there is no such folder, or its config.json cannot be read.
    """
    architecture = read_config(resolve_model_path(path)).architecture
    return ARCHITECTURES[architecture].task == "spans"


def parse_batches(
    model: SpanParser | SpanParserEnsemble, batches: Iterator[SpanBatch], device: torch.device
) -> Iterator[tuple[SpanBatch, list[tuple[list[str], list[tuple[int, int, str]]]]]]:
    """Yield each batch with the tags and the constituents that the model finds in each of its sentences.

    Raises: NonFiniteError: the model gives NaN.
    """
    config = model.config
    for batch in batches:
        moved = batch.to(device)
        charts = model.charts(moved.pieces, moved.affixes, moved.lengths)
        is_word = torch.arange(charts.scores.shape[1]) < batch.lengths[:, None]
        is_span = (is_word[:, :, None] & is_word[:, None]).triu()  # other scores are undefined
        refuse_nan(bool(charts.scores.cpu()[is_span].isnan().any()))
        labels, tags = charts.labels.cpu(), charts.tags.tolist()
        in_trees = tree_spans(best_splits(charts.scores.cpu()), batch.lengths)
        spans: list[list[tuple[int, int, str]]] = [[] for _ in tags]
        for row, first, last in (in_trees & (labels > 0)).nonzero().tolist():
            spans[row].append((first, last + 1, config.constituents[int(labels[row, first, last]) - 1]))
        yield (
            batch,
            [
                ([config.tags[tag] for tag in some[:length]], constituents)
                for some, length, constituents in zip(tags, batch.lengths.tolist(), spans, strict=True)
            ],
        )


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

    def save_pretrained(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a model folder; see `Translator.save_pretrained`."""
        self.model.save_pretrained(path, dtype=dtype)

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
