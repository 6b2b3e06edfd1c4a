"""Constituency parsing by a chart over scores of spans: model and tokenizer in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.pretrained import read_config
from manyheads.catalogue import ARCHITECTURES
from manyheads.decoding.model_runner import RunsEncoder
from manyheads.decoding.text_ids import check_texts
from manyheads.errors import DataError, RequestError, refuse_nan
from manyheads.extras.parsing.chart import best_splits, tree_spans
from manyheads.extras.parsing.parsing_text import words_of
from manyheads.extras.parsing.span_parser import SpanParser, SpanParserEnsemble
from manyheads.extras.parsing.span_settings import MOST_WORDS
from manyheads.extras.parsing.span_store import SpanBatch, SpanRow, SpanStore, eval_spans
from manyheads.extras.parsing.spans import spans_of, tree_of
from manyheads.extras.parsing.trees import Node, parse_tree
from manyheads.extras.parsing.word_features import affix_hashes, word_pieces
from manyheads.text.settings import ParsingSettings

__all__ = ["BATCH_WORDS", "ChartParser", "holds_chart_parser", "parse_batches"]

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
        told: Callable[[int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[Node | None]:
        """Return the tree of each sentence over exactly its words; None for a sentence without words.

        Args:
            sentences: words separated by spaces.
            max_tokens: words of a batch.
            first_number: number of the first sentence in messages.
            told: called after each batch with the number of finished sentences.
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
                if told is not None:
                    told(done)
                if stop is not None and stop():
                    break
        return found

    __call__ = parse

    def log_probs(
        self, trees: Sequence[str], *, first_number: int = 1, told: Callable[[int], None] | None = None
    ) -> Tensor:
        """Return the log-probability of each tree, as one of its binary forms, and of its tags. (trees,) in float64

        Args: trees: in brackets. first_number, told: as of `parse`.

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
                if told is not None:
                    told(place + 1)
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
