"""Evaluation of a chart parser: bracket scores by evalb's rules, and log-probabilities of given trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.data.lines import GivenItems, Progress, ReadReport, describe, phase_progress
from manyheads.decoding.inputs_and_results import naming_lines
from manyheads.distributed.process import refuse_ranks
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import DataError
from manyheads.extras.parsing.brackets import judge_trees
from manyheads.extras.parsing.parser import ChartParser, Parser
from manyheads.extras.parsing.sequence_task.evaluate import ParsingReport
from manyheads.extras.parsing.span_data import SpanData
from manyheads.extras.parsing.tokenizer import ParsingTask, read_sentences
from manyheads.tasks.held_out import chosen_split, own_data
from manyheads.tasks.report import LineWork, machine_lines, model_line, model_record

if TYPE_CHECKING:
    from manyheads.extras.parsing.span_task.options import EvaluateOptions, ScoreOptions


@dataclass(frozen=True)
class SpanReport(ParsingReport):
    """See `tasks.report.Report`."""

    def protocol_lines(self) -> list[str]:
        protocol = self.protocol
        search = (
            f"  search     most probable constituents of a chart, {protocol['labels']} labels, {protocol['tags']} tags"
        )
        return [model_line(protocol), search, *machine_lines(protocol)]


def evaluate(options: EvaluateOptions, progress: Progress) -> SpanReport:
    """Judge a model on held-out trees.

    Raises: DataError: the trees cannot be read, or the file has none. RequestError: a sentence is too long.
        ConfigError: no setting names the trees.
    """
    refuse_ranks("evaluate of trees")
    read = ReadReport()
    gold, name = _gold(options, read)
    if not gold:
        raise DataError(f"{name} has no trees; there is nothing to evaluate.")
    parser = options.run_on.load(Parser.from_pretrained, options.models.all(options.model), progress).chart
    sentences, trees = [sentence for sentence, _ in gold], [tree for _, tree in gold]
    on_progress = phase_progress(progress, "parsing", len(gold))
    with naming_lines("tree", sentence=name):
        found = parser.parse(sentences, max_tokens=options.max_tokens, on_progress=on_progress)
    progress("judging the trees", 0, 0)
    config = parser.model.config
    protocol = {
        "data": name,
        "sentences": len(gold),
        **model_record(options.model, parser.model, parser.device, parser.precision),
        **options.models.record(),
        "tokenizer": parser.tokenizer.digest,
        "labels": len(config.constituents),
        "tags": len(config.tags),
        "max_tokens": options.max_tokens,
    }
    return SpanReport(judge_trees(found, trees, root=config.root), None, protocol, read)


def _gold(options: EvaluateOptions, read: ReadReport) -> tuple[list[tuple[str, str]], str]:
    """Return sentences with their trees, and their name."""
    if options.trees is not None:
        return read_sentences(options.trees, ParsingTask(), options.on_bad_utf8, read), describe(options.trees)
    path = options.data if options.data is not None else own_data(options.model, "--trees FILE")[0]
    texts = SpanData.open(path).texts
    split = chosen_split({name: texts.get(name) for name in ("test", "valid")}, options.split)
    if split is None:
        raise DataError(f"{path} has no {options.split or 'test or valid'} trees; give --trees FILE.")
    return texts[split], f"{path} {split}"


_BLOCK = 256


def score(options: ScoreOptions, progress: Progress) -> LineWork[tuple[str, str]]:
    """Load the model. Raises: DataError: the file cannot be read."""
    report = ReadReport()
    items = read_sentences(options.trees, ParsingTask(), options.on_bad_utf8, report)
    parser = options.run_on.load(ChartParser.from_pretrained, options.models.all(options.model), progress)

    def work(first: int, some: list[tuple[str, str]]) -> Iterator[str]:
        on_progress = phase_progress(progress, "scoring", len(items), first)
        with naming_lines("tree", sentence=options.trees):  # a tree can span several lines
            scores = parser.log_probs([tree for _, tree in some], first_number=first + 1, on_progress=on_progress)
        for value, (sentence, _) in zip(scores.tolist(), some, strict=True):
            yield f"{value:.6f}\t{len(sentence.split(' '))}"

    identity = {
        "command": "score",
        "model": model_identity(options.model),
        **options.models.identity(),
        "form": options.on_bad_utf8,
        "precision": parser.precision,
    }
    return LineWork(GivenItems(items, _BLOCK, [options.trees], report), work, identity, {})
