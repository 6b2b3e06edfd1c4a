"""The labelled texts that a classifier is judged on: files, prepared data, or the run's own data."""

from __future__ import annotations

from manyheads.errors import DataError
from manyheads.extras.classification.classifier import Classifier
from manyheads.extras.classification.labelled_files import Labelled, LabelledFiles, LabelledReport
from manyheads.extras.classification.labelled_settings import TATOEBA_LANGUAGES
from manyheads.extras.classification.prepared import LabelledData, languages_of
from manyheads.extras.classification.task.options import EvaluateOptions, LabelledOptions
from manyheads.tasks.held_out import chosen_split, own_data
from manyheads.tasks.preparation import check_keys

__all__ = ["check_known", "given_texts", "held_out_texts", "numbered_unit"]


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
