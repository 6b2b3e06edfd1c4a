"""The options of commands for classifiers; and `manyheads classify MODEL [INPUT]`: a line in, a label out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.output import LineWriter, check_files, converse, greet, is_conversation, write_lines
from manyheads.cli.process import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.checks import at_least, check
from manyheads.config.options import CommandPage, Shared, argument, group, option
from manyheads.data.lines import LinesOf, OnBadUtf8, Progress, phase_progress
from manyheads.decoding.options import DeviceOptions, EnsembleOptions
from manyheads.distributed.sharded_lines import is_sharded, model_identity
from manyheads.errors import ConfigError, RequestError
from manyheads.tasks import preparation
from manyheads.tasks.translation.options import TokenizerOptions

if TYPE_CHECKING:
    from manyheads.extras.classification.classifier import Classifier, Prediction
    from manyheads.tasks.report import LineWork


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Options of `manyheads classify`."""

    model: str = Shared.model()
    input: str = argument("A text file, plain or gzip; - is standard input.", default="-", metavar="INPUT")
    output: str = Shared.output("the labels")
    scores: bool = option("Write the probability of each label after a tab.", default=False)
    num_return_sequences: int | None = option(
        "The N most probable labels of each line: line number, probability, label.",
        metavar="N",
        default_is="the best one alone",
        aliases=("--nbest",),
    )
    json: bool = Shared.json(
        "Write one JSON object per line, with the text and all labels with their probabilities, best first."
    )
    max_tokens: int = option(
        "Maximum size of a batch in tokens: rows x longest text. A longer text does not fit.", 4096, metavar="N"
    )
    too_long: Literal["fail", "truncate"] = option(
        "If a text does not fit: stop and name its line, or truncate it and report how many were truncated.",
        default="fail",
    )
    on_bad_utf8: OnBadUtf8 = Shared.on_bad_utf8("the output has an empty line")
    lines_at_once: int = option("Number of lines that are classified together.", default=256, metavar="N")
    models: EnsembleOptions = group(EnsembleOptions)
    run_on: DeviceOptions = group(DeviceOptions)

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "num_return_sequences", "lines_at_once")
        check(self, "--", at_least(2), "max_tokens")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(preparation.PrepareOptions):
    """Options of `manyheads prepare --task classification`."""

    tsv: str | None = option("Training texts, label<TAB>text; - is standard input.", default=None, metavar="FILE")
    jsonl: str | None = option("Training texts, one JSON object per line.", default=None, metavar="FILE")
    texts: str | None = option("Training texts, one per line, with --labels.", default=None, metavar="FILE")
    labels: str | None = option("Their labels, line by line.", default=None, metavar="FILE")
    valid_tsv: str | None = option("Validation texts.", default=None, metavar="FILE")
    valid_jsonl: str | None = option("Validation texts.", default=None, metavar="FILE")
    valid_texts: str | None = option("Validation texts, with --valid-labels.", default=None, metavar="FILE")
    valid_labels: str | None = option("Their labels.", default=None, metavar="FILE")
    test_tsv: str | None = option("Test texts.", default=None, metavar="FILE")
    test_jsonl: str | None = option("Test texts.", default=None, metavar="FILE")
    test_texts: str | None = option("Test texts, with --test-labels.", default=None, metavar="FILE")
    test_labels: str | None = option("Their labels.", default=None, metavar="FILE")
    text_key: str | None = option(
        "Key of the text in JSONL (a.b is nested), or column of TSV: its name, or a number from 1 without a header.",
        metavar="KEY",
        default_is="text; of TSV the second column",
    )
    label_key: str | None = option(
        "Key or column of the label.", metavar="KEY", default_is="label; of TSV the first column"
    )
    valid_count: int | None = option(
        "Without validation files: hold back N training texts, chosen by a hash of the text; 0: no validation.",
        default=None,
        metavar="N",
    )
    on_empty: Literal["fail", "skip"] = option(
        "A line without text or without label: fail, or skip it; counted.", default="fail"
    )
    vocabulary: TokenizerOptions = group(TokenizerOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "--", at_least(0), "valid_count")


@dataclass(frozen=True, kw_only=True)
class LabelledOptions:
    """Options that name labelled texts."""

    tsv: str | None = option("Labelled texts, label<TAB>text.", default=None, metavar="FILE")
    jsonl: str | None = option("Labelled texts, one JSON object per line.", default=None, metavar="FILE")
    texts: str | None = option("Texts, one per line, with --labels.", default=None, metavar="FILE")
    labels: str | None = option("Their labels, line by line.", default=None, metavar="FILE")
    text_key: str | None = option(
        "Key of the text in JSONL (a.b is nested), or column of TSV: its name, or a number from 1 without a header.",
        metavar="KEY",
        default_is="text; of TSV the second column",
    )
    label_key: str | None = option(
        "Key or column of the label.", metavar="KEY", default_is="label; of TSV the first column"
    )
    on_empty: Literal["fail", "skip"] = option(
        "A line without text or without label: fail, or skip it.", default="fail"
    )
    on_bad_utf8: Literal["fail", "replace"] = Shared.on_bad_utf8()
    max_tokens: int = option("Maximum size of a batch in tokens: rows x longest text.", default=4096, metavar="N")
    too_long: Literal["fail", "truncate"] = option(
        "If a text does not fit: stop and name its line, or truncate it and report how many were truncated.",
        default="fail",
    )
    models: EnsembleOptions = group(EnsembleOptions)
    run_on: DeviceOptions = group(DeviceOptions)

    def __post_init__(self) -> None:
        check(self, "--", at_least(2), "max_tokens")

    @property
    def inputs(self) -> tuple[str | None, ...]:
        """Files that are read."""
        return self.tsv, self.jsonl, self.texts, self.labels


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(LabelledOptions):
    """Options of `manyheads evaluate` for a classifier."""

    model: str = Shared.model()
    data: str | None = option(
        "A folder written by prepare, or embedded:tatoeba-languages.", metavar="DATA", default_is="the run's"
    )
    split: Literal["test", "valid"] | None = option("Which part of the data.", default_is="test if there is one")
    picture: str | None = option(
        "Draw the confusion matrix into a file that ends in .png, .svg or .pdf.", default=None, metavar="FILE"
    )
    output: str | None = option(
        "Save the predicted labels, one per line.", default=None, metavar="FILE", aliases=("-o",)
    )
    json: bool = Shared.json()

    def __post_init__(self) -> None:
        super().__post_init__()
        given = any(path is not None for path in self.inputs)
        if given and (self.data is not None or self.split is not None):
            raise ConfigError("Labelled texts are given by files and by --data; leave out --data and --split.")
        if self.picture is not None and not self.picture.lower().endswith((".png", ".svg", ".pdf")):
            raise ConfigError(f"--picture {self.picture}: it must end in .png, .svg or .pdf.")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(LabelledOptions):
    """Options of `manyheads score` for a classifier."""

    model: str = Shared.model()
    output: str = Shared.output("the scores")


PREPARE = CommandPage(
    PrepareOptions,
    """Convert labelled texts to a folder of tokens for training. Each split is a TSV file (label<TAB>text), a JSONL
file, or two files, texts and labels: plain or gzip, UTF-8, one text per line. The labels are those of the training
texts, sorted; a label that occurs only in validation or test texts is refused. One tokenizer is trained on the training
texts, unless --tokenizer names one.""",
    (
        "manyheads prepare --task classification --tsv train.tsv --valid-count 500 --test-tsv test.tsv -o data/news",
        "manyheads prepare --task classification --jsonl train.jsonl --text-key body --label-key topic"
        " --valid-jsonl valid.jsonl -o data/news",
    ),
)

EVALUATE = CommandPage(
    EvaluateOptions,
    """Evaluate a classifier on held-out texts: accuracy with its 95% interval, macro F1, scores of each label, the
confusion matrix, and the protocol. Texts come from files or --data; without either, from the data of the run.""",
    (
        "manyheads evaluate runs/genres",
        "manyheads evaluate runs/genres --tsv test.tsv --picture confusion.png --output predicted.txt",
    ),
)

SCORE = CommandPage(
    ScoreOptions,
    """Compute the log-probabilities (in nats) that a classifier gives to known labels. Each text gives a line with two
tab-separated columns: the log-probability, and the rank of the label among all labels, from 1.""",
    (
        "manyheads score runs/genres --tsv test.tsv",
        "manyheads score runs/genres --texts texts.txt --labels labels.txt --output scores.tsv",
    ),
)


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
