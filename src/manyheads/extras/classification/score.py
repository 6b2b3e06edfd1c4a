"""Log-probabilities of given labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from manyheads.data.lines import GivenItems, Progress, phase_progress
from manyheads.decoding.text_ids import naming_lines
from manyheads.distributed.sharded_lines import model_identity
from manyheads.extras.classification.classifier import Classifier
from manyheads.extras.classification.evaluate import check_known, given_texts, numbered_unit
from manyheads.extras.classification.labelled_files import LabelledReport
from manyheads.tasks.report import LineWork

if TYPE_CHECKING:
    from manyheads.extras.classification.options import ScoreOptions

_BLOCK = 2048


def score(options: ScoreOptions, progress: Progress) -> LineWork[tuple[int, str]]:
    """Load the model. Raises: DataError: the files cannot be read, or have a label that the model does not know."""
    report = LabelledReport()
    rows, name = given_texts(options, report)
    classifier = options.run_on.load(Classifier.from_pretrained, options.models.all(options.model), progress)
    items = list(zip(check_known(rows, classifier, name), (row.text for row in rows), strict=True))

    def work(first: int, some: list[tuple[int, str]]) -> Iterator[str]:
        with naming_lines(numbered_unit(report), text=name):
            found = classifier.log_probs(
                [text for _, text in some],
                max_tokens=options.max_tokens,
                too_long=options.too_long,
                first_number=first + 1,
                on_progress=phase_progress(progress, "scoring", len(items), first),
            )
        for values, (number, _) in zip(found, some, strict=True):
            yield f"{float(values[number]):.6f}\t{1 + int((values > values[number]).sum())}"

    identity = {
        "command": "score",
        "model": model_identity(options.model),
        **options.models.identity(),
        "form": (options.on_bad_utf8, options.on_empty, options.max_tokens, options.too_long),
        "precision": classifier.precision,
    }
    files = [path for path in options.inputs if path is not None]
    return LineWork(GivenItems(items, _BLOCK, files, report), work, identity, {})
