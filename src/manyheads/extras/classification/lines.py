"""Output lines of `classify`: the label of each line, or the best ones with their probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator

from manyheads.cli.lines.conversation import converse
from manyheads.cli.lines.output import LineWriter
from manyheads.data.line_source import LinesOf
from manyheads.data.progress import Progress, telling
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import RequestError
from manyheads.extras.classification.classifier import Classifier, Prediction
from manyheads.extras.classification.options import ClassifyOptions
from manyheads.tasks.report import LineWork

__all__ = ["LabelLines"]


class LabelLines:
    """Converts predictions to lines. Raises: RequestError: more labels are requested than the model has."""

    def __init__(self, classifier: Classifier, options: ClassifyOptions) -> None:
        self._classifier, self._options = classifier, options
        if options.num_return_sequences is not None and options.num_return_sequences > len(classifier.labels):
            raise RequestError(
                f"--nbest is {options.num_return_sequences}, but the model has {len(classifier.labels)} labels; ask for"
                " at most as many."
            )

    def converse(self) -> None:
        """Label every line that the user types."""
        with LineWriter(self._options.output) as writer:
            converse("a text", lambda number, line: writer.write(self.block(number, [line])))

    def job(self, show: Progress) -> LineWork[str]:
        """The classification of the whole input."""
        options = self._options

        def work(first: int, lines: list[str]) -> Iterator[str]:
            told = telling(show, "classifying lines", 0, first)
            yield from self.block(first, lines)
            told(len(lines))

        identity = {
            "command": "classify",
            "model": model_identity(options.model),
            **options.models.identity(),
            "form": (options.json, options.num_return_sequences, options.scores, options.too_long, options.on_bad_utf8),
            "max_tokens": options.max_tokens,
            "precision": self._classifier.precision,
        }
        source = LinesOf(options.input, options.lines_at_once, options.on_bad_utf8)
        return LineWork(source, work, identity, {"text": options.input})

    def block(self, first: int, lines: list[str]) -> list[str]:
        """Return the output of some lines. first: number of the first one, from 0. An empty line has no label."""
        log_probs = self._classifier.log_probs(
            lines,
            max_tokens=self._options.max_tokens,
            too_long=self._options.too_long,
            first_number=first + 1,
        )
        found = self._classifier.predictions(log_probs)
        return [
            shown
            for number, (line, one) in enumerate(zip(lines, found, strict=True), first + 1)
            for shown in self._shown(number, line, one if line.strip() else None)
        ]

    def _shown(self, number: int, line: str, one: Prediction | None) -> list[str]:
        options = self._options
        ranked = [] if one is None else list(one.probabilities.items())[: options.num_return_sequences]
        if options.json:
            labels = [{"label": label, "probability": value} for label, value in ranked]
            return [json.dumps({"line": number, "text": line, "labels": labels}, ensure_ascii=False)]
        if options.num_return_sequences is not None:
            return [f"{number}\t{value:.6f}\t{label}" for label, value in ranked] or [f"{number}\t\t"]
        if one is None:
            return [""]
        return [f"{one.label}\t{one.probability:.6f}" if options.scores else one.label]
