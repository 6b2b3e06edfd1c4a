"""Evaluation of a classifier on labelled texts (files, prepared data, or the data of its run): accuracy, macro F1,
confusion matrix, likelihood, and what they depend on; log-probabilities of given labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyheads.catalogue import HOOKS, load
from manyheads.data.lines import GivenItems, Progress, phase_progress
from manyheads.decoding.inputs_and_results import counted_truncations, naming_lines
from manyheads.distributed.process import refuse_ranks
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import DataError
from manyheads.extras.classification.classes import Confusion
from manyheads.extras.classification.classifier import Classifier
from manyheads.extras.classification.labelled_files import Labelled, LabelledFiles, LabelledReport
from manyheads.extras.classification.prepare import LabelledData, languages_of
from manyheads.extras.classification.settings import TATOEBA_LANGUAGES
from manyheads.tasks.held_out import chosen_split, own_data
from manyheads.tasks.preparation import check_keys
from manyheads.tasks.report import LineWork, machine_lines, model_line, model_record

if TYPE_CHECKING:
    from manyheads.extras.classification.options import EvaluateOptions, LabelledOptions, ScoreOptions


@dataclass(frozen=True)
class ClassificationReport:
    """See `tasks.report.Report`.

    nats_per_text: mean negative log-likelihood of the right labels. picture: the file for the confusion matrix.
    """

    confusion: Confusion
    nats_per_text: float
    protocol: dict[str, Any]
    output: list[str]
    read: LabelledReport
    picture: str | None = None

    def save(self) -> None:
        if self.picture is None:
            return
        title = f"{self.protocol['model']} on {self.protocol['data']}"
        shown = (self.picture, self.confusion.counts, self.confusion.labels)
        load(HOOKS["picture"])("confusion", *shown, title=title).save()

    def to_json(self) -> dict[str, Any]:
        return {**self.confusion.to_json(), "nats_per_text": self.nats_per_text, "protocol": self.protocol}

    def to_lines(self) -> list[str]:
        protocol = self.protocol
        lines = [*self.confusion.to_lines(), f"likelihood = {self.nats_per_text:.4f} nats/text"]
        lines += ["protocol", f"  data       {protocol['data']}", f"  texts      {protocol['texts']:,}"]
        lines += [model_line(protocol), f"  labels     {len(protocol['labels'])}, pooling {protocol['pooling']}"]
        lines.append(f"  truncated  {protocol['truncated_texts']} texts")
        if self.read.empty_dropped:
            lines.append(f"  left out   {self.read.empty_dropped} lines without text or label")
        return [*lines, *machine_lines(protocol)]


def evaluate(options: EvaluateOptions, progress: Progress) -> ClassificationReport:
    """Judge a classifier.

    Raises: DataError: the texts cannot be read, or have a label that the model does not know. RequestError: a text is
        too long. MissingExtraError: a picture needs matplotlib.
    """
    refuse_ranks("evaluate of a classifier")
    if options.picture is not None:
        load(HOOKS["check pictures"])([options.picture], given_by="--picture")
    read = LabelledReport()
    rows, name = held_out_texts(options, read)
    classifier = options.run_on.load(Classifier.from_pretrained, options.models.all(options.model), progress)
    right = check_known(rows, classifier, name)
    with naming_lines(numbered_unit(read), text=name), counted_truncations() as cut:
        log_probs = classifier.log_probs(
            [row.text for row in rows],
            max_tokens=options.max_tokens,
            too_long=options.too_long,
            on_progress=phase_progress(progress, "classifying", len(rows)),
        )
    chosen = log_probs.argmax(1).tolist()
    nll = math.fsum(-float(values[number]) for values, number in zip(log_probs, right, strict=True))
    confusion = Confusion.of(classifier.labels, zip(right, chosen, strict=True))
    protocol = {
        "data": name,
        "texts": len(rows),
        **model_record(options.model, classifier.model, classifier.device, classifier.precision),
        **options.models.record(),
        "tokenizer": classifier.tokenizer.digest,
        "labels": list(classifier.labels),
        "pooling": " + ".join(dict.fromkeys(model.config.pooling for model in classifier.models)),
        "max_tokens": options.max_tokens,
        "truncated_texts": cut.count,
    }
    predicted = [classifier.labels[number] for number in chosen]
    return ClassificationReport(confusion, nll / len(rows), protocol, predicted, read, options.picture)


def given_texts(options: LabelledOptions, report: LabelledReport) -> tuple[list[Labelled], str]:
    """Return the rows of the files that are named, and their name; see `LabelledFiles.read` for errors."""
    names = ("tsv", "jsonl", "texts", "labels", "text_key", "label_key", "on_bad_utf8", "on_empty")
    files = LabelledFiles(**{name: getattr(options, name) for name in names})
    check_keys(options, ("text_key", "label_key"), files.has_keys)
    return list(files.read(report)), files.describe()


def held_out_texts(options: EvaluateOptions, report: LabelledReport) -> tuple[list[Labelled], str]:
    """Return the rows to judge on, and their name.

    Raises: DataError: the texts cannot be read, or the set is empty. ConfigError: no setting names the set.
    """
    if any(path is not None for path in options.inputs):
        rows, name = given_texts(options, report)
    else:
        check_keys(options, ("text_key", "label_key"), has_keys=False)
        data = options.data if options.data is not None else own_data(options.model, "--tsv FILE")[0]
        if data == TATOEBA_LANGUAGES:
            split = options.split or "test"
            rows, name = languages_of(split), f"{data} {split}"
        else:
            texts = LabelledData.open(data).texts
            chosen = chosen_split({split: texts.get(split) for split in ("test", "valid")}, options.split)
            if chosen is None:
                raise DataError(
                    f"{data} has no {options.split or 'test or valid'} texts; give files instead: --tsv FILE."
                )
            rows, name = texts[chosen], f"{data} {chosen}"
    if not rows:
        raise DataError(f"{name} has no texts; there is nothing to evaluate.")
    return rows, name


def numbered_unit(report: LabelledReport) -> str:
    """Return the unit of the numbers of texts in messages: lines, unless some were left out."""
    return "text" if report.empty_dropped else "line"


def check_known(rows: list[Labelled], classifier: Classifier, name: str) -> list[int]:
    """Return the ids of the labels. Raises: DataError: the model does not know a label."""
    numbers = {label: number for number, label in enumerate(classifier.labels)}
    for row in rows:
        if row.label not in numbers:
            place = f"{name}: line {row.line}" if row.line else name
            shown = ", ".join(classifier.labels[:10]) + (" ..." if len(numbers) > 10 else "")
            raise DataError(
                f"{place} has the label {row.label!r}, which the model does not know; its labels are {shown}. Correct"
                " it, leave the line out, or train a model with it."
            )
    return [numbers[row.label] for row in rows]


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
