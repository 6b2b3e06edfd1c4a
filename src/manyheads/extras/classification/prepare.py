"""Preparation of labelled texts from files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.data.preparing import SPLITS
from manyheads.errors import ConfigError
from manyheads.extras.classification.labelled_files import LabelledFiles
from manyheads.extras.classification.prepared import LabelledData, describe_balance, prepare_labelled
from manyheads.tasks.preparation import (
    check_holdout,
    check_keys,
    chosen_vocabulary,
    count_lines,
    summary_of,
    vocabulary_lines,
)
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from manyheads.extras.classification.options import PrepareOptions

_FORMS = ("tsv", "jsonl", "texts", "labels")


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.report.Task`.

    Raises: ConfigError: training or validation texts are missing, or are given in two forms.
    """
    splits: dict[str, LabelledFiles] = {}
    for split in SPLITS:
        prefix = "" if split == "train" else f"{split}_"
        given = {form: getattr(options, prefix + form) for form in _FORMS}
        if any(path is not None for path in given.values()):
            splits[split] = _files(options, split, given)
    if "train" not in splits:
        raise ConfigError("There are no training texts: give --tsv, --jsonl, or --texts and --labels.")
    check_keys(options, ("text_key", "label_key"), any(files.has_keys for files in splits.values()))
    check_holdout(options, [f"--valid-{form}" for form in _FORMS], "--valid-count", "500")
    tokenizer = chosen_vocabulary(options.vocabulary, TokenizerSettings, Tokenizer.load)
    return partial(
        prepare_labelled,
        train=splits["train"],
        valid=splits.get("valid"),
        test=splits.get("test"),
        tokenizer=tokenizer,
        num_held_back=options.valid_count or 0,
    )


def _files(options: PrepareOptions, split: str, given: dict[str, Any]) -> LabelledFiles:
    """Raises: ConfigError: the texts are given in two forms, or incompletely."""
    names = ("text_key", "label_key", "on_bad_utf8", "on_empty")
    try:
        return LabelledFiles(**given, **{name: getattr(options, name) for name in names})
    except ConfigError as error:
        raise ConfigError(f"The {split} texts: {error}") from None


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `tasks.report.Task`."""
    data = LabelledData.open(folder, verify=False)
    lines = vocabulary_lines(manifest)
    for split, counts in manifest["counts"].items():
        lines += ["", f"{split}: {counts['texts']:,} texts"]
        lines += count_lines({**counts, "lines": 0})
        mean, unknown = counts["tokens"] / max(counts["texts"], 1), counts["unknown"]
        noted = f", {unknown:,} unknown" if unknown else ""
        lines.append(f"  {counts['tokens']:>13,} tokens: {mean:.1f} a text, {counts['longest']:,} the longest{noted}")
        if counts["known_texts"]:
            lines.append(f"  {counts['known_texts']:>13,} texts that are also training texts, so their scores flatter")
        lines.append(f"  {describe_balance(manifest['label_counts'][split])}")
    return summary_of(data, lines, "classifier-demo")
