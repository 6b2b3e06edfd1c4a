"""Log-probabilities of given trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from manyheads.data.lines import GivenItems, Progress, ReadReport, phase_progress
from manyheads.decoding.text_ids import naming_lines
from manyheads.distributed.sharded_lines import model_identity
from manyheads.extras.parsing.parser import ChartParser
from manyheads.extras.parsing.tokenizer import ParsingTask, read_sentences
from manyheads.tasks.report import LineWork

if TYPE_CHECKING:
    from manyheads.extras.parsing.span_task.options import ScoreOptions

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
