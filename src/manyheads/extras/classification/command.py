"""`manyheads classify MODEL [INPUT]`: a line in, a label out; a prompt in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.output import LineWriter, check_files, converse, greet, is_conversation, write_lines
from manyheads.cli.process import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage
from manyheads.data.lines import LinesOf, Progress, phase_progress
from manyheads.distributed.sharded_lines import is_sharded, model_identity
from manyheads.errors import RequestError
from manyheads.extras.classification.options import ClassifyOptions

if TYPE_CHECKING:
    from manyheads.extras.classification.classifier import Classifier, Prediction
    from manyheads.tasks.report import LineWork

PAGE = CommandPage(
    ClassifyOptions,
    """Give each line of text the label that a classifier finds most probable: one line in, one line out, in order; an
empty line gives an empty line.
Without INPUT, standard input is read; in a terminal there is a prompt, and Ctrl-D ends it.
With --scores the probability follows after a tab. With --nbest N each input line gives N lines of three columns: line
number (from 1), probability, label.""",
    (
        'echo "Guten Tag!" | manyheads classify runs/languages',
        "manyheads classify runs/languages input.txt --scores --output labels.tsv",
        "manyheads classify runs/languages input.txt --nbest 3",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Classify lines. Returns: the exit code."""
    set_up_machine()
    options = parse(PAGE, arguments, "classify")
    check_files(options.output, options.input)
    if is_conversation(options.input):
        greet(options.model)
    from manyheads.extras.classification.classifier import Classifier

    models = options.models.all(options.model)
    lines = LabelLines(options.run_on.load(Classifier.from_pretrained, models), options)
    if is_conversation(options.input) and not is_sharded(options.output):
        lines.converse()
        return 0
    with showing_if_long() as progress:
        write_lines(lines.job(progress), options.output, progress)
    return 0


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

    def job(self, progress: Progress) -> LineWork[str]:
        """The classification of the whole input."""
        from manyheads.tasks.report import LineWork

        options = self._options

        def work(first: int, lines: list[str]) -> Iterator[str]:
            on_progress = phase_progress(progress, "classifying lines", 0, first)
            yield from self.block(first, lines)
            on_progress(len(lines))

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
