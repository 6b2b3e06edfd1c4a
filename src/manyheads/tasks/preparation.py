"""The parts of `manyheads prepare` that are the same for all tasks: options, checks and the summary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from manyheads.catalogue import HOOKS, TASKS
from manyheads.catalogue import load as load_entry
from manyheads.config.build import build
from manyheads.config.options import given_options, names_of, option
from manyheads.data.lines import OnBadUtf8
from manyheads.errors import ConfigError, DataError
from manyheads.files.output_safety import check_spares_folders

if TYPE_CHECKING:
    from manyheads.text.settings import Extension

    Word = str
else:
    Word = Literal[tuple(task.prepared_as for task in TASKS.values() if task.prepared_as)]

S = TypeVar("S")
V = TypeVar("V")

_COUNTS = {
    "bytes": "bytes",
    "characters": "characters",
    "words": "words",
    "lines": "lines",
    "documents": "documents",
    "unknown": "of the words are <unk>",
    "empty_dropped": "left out, because a line is empty",
    "empty_kept": "with an empty side, kept",
    "bad_utf8_replaced": "lines that were not UTF-8, bad bytes replaced",
    "bad_utf8_skipped": "left out, because they are not UTF-8",
    "line_breaks_replaced": "with line breaks inside, replaced by spaces",
    "columns_ignored": "lines with more than two columns, the others left out",
    "headers_kept": "first lines that look like a header, kept; name the columns, and a header is no text",
    "units_incomplete": "translation units without one of the languages, left out",
    "variants_ignored": "further variants of a language in a translation unit, left out",
    "bad_units_replaced": "translation units with characters that XML does not allow, replaced",
    "bad_units_skipped": "translation units with characters that XML does not allow, left out",
    "control_characters": "with control characters inside (NUL, carriage return, ...), kept",
    "long_lines": "with a line above 10,000 characters; the tokenizer learns from a part of it",
}


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of `manyheads prepare` for all tasks.

    Raises: ConfigError: standard input is named twice.
    """

    output: str = option("The folder to create; it appears when it is complete.", metavar="DIR", aliases=("-o",))
    task: Word = option(
        "The task of the model: translation; spans (parsing with a chart over spans) or parsing (writing trees as "
        "text); lm (language model); or classification."
        " Each task has its own options: `manyheads prepare --task lm --help`.",
        default="translation",
    )
    replace: bool = option("Replace existing prepared data when the new data is complete.", default=False)
    on_bad_utf8: OnBadUtf8 = option(
        "If a line is not UTF-8: fail, replace its bad bytes, or skip it (and its pair). Such lines are counted.",
        default="fail",
    )

    def __post_init__(self) -> None:
        named = []
        for item in fields(self):
            value = getattr(self, item.name)
            paths = value if isinstance(value, tuple) else (value,)
            named += [names_of(item)[0] for path in paths if path == "-" and item.name != "output"]
        if len(named) > 1:
            raise ConfigError(f"Standard input can be read once, but {' and '.join(named)} are all -.")


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """Tokenizer."""

    tokenizer: str | None = option(
        "Do not train a tokenizer; use this tokenizer.json, or the one of this model, run or data folder.",
        default=None,
        metavar="FILE",
    )
    vocab_size: int | None = option(
        "Number of pieces, for both languages together; for words or ids of a language model the maximum number.",
        metavar="N",
        default_is="8000; for words or ids of a language model no limit",
        aliases=("--tokenizer.vocab-size",),
    )
    new_pieces: int | None = option(
        "With --tokenizer: learn at most N more pieces from the training text. All ids of the tokenizer stay, so a"
        " model that has it can be trained further (train --init).",
        default=None,
        metavar="N",
    )
    lowercase: bool = option(
        "Convert text to lower case before tokenizing; output is then in lower case.",
        default=False,
        aliases=("--tokenizer.lowercase",),
    )


def chosen_vocabulary(
    options: VocabularyOptions, settings: type[S], load: Callable[[Path], V], defaults: Mapping[str, Any] | None = None
) -> S | V | Extension:
    """The settings of the vocabulary to be made, or the vocabulary that `--tokenizer` names, perhaps to learn more.

    Args:
        options: as they were given.
        settings: of a vocabulary to be made; it has fields of the options' names.
        load: reads a tokenizer.json.
        defaults: settings in place of the class's defaults.

    Raises: ConfigError: a setting is out of range, or contradicts `--tokenizer`. DataError: the file cannot be read.
    """
    if options.tokenizer is None:
        if options.new_pieces is not None:
            raise ConfigError(
                f"--new-pieces {options.new_pieces} adds to the tokenizer of a model; name it with --tokenizer. The"
                " size of a new tokenizer is --vocab-size."
            )
        given = {item.name: getattr(options, item.name) for item in fields(options) if item.name != "new_pieces"}
        chosen = {name: value for name, value in given.items() if value is not None and value is not False}
        return build(settings, {**(defaults or {}), **chosen}, "the tokenizer's options")
    if others := [name for name in given_options(options) if name not in ("--tokenizer", "--new-pieces")]:
        raise ConfigError(
            f"--tokenizer {options.tokenizer} is used as it is; leave out {', '.join(others)}. (--new-pieces N adds"
            " pieces to it.)"
        )
    path = Path(options.tokenizer)
    inside = (path / "tokenizer.json", path / "model" / "tokenizer.json")
    found = load(next((file for file in inside if file.is_file()), path))
    if options.new_pieces is None:
        return found
    extension: Extension = load_entry(HOOKS["vocabulary extension"])(found, options.new_pieces)
    return extension


def check_holdout(options: PrepareOptions, files: Sequence[str], held_out: str, usual: str = "") -> None:
    """Compare the files of a held-out part with the option that takes it from the training data.

    Args:
        options: as they were given.
        files: the options that name files.
        held_out: the option that takes a part of the training data.
        usual: a value of it, for the message; empty if the part may be missing.

    Raises: ConfigError: both are given, or neither.
    """
    given = given_options(options)
    named = [name for name in files if name in given]
    if named and held_out in given:
        raise ConfigError(f"{held_out} takes the part from the training data; leave it out where {named[0]} is given.")
    if usual and not named and held_out not in given:
        like_training = [name for name in files if name.replace("--valid-", "--") in given]
        raise ConfigError(
            "There is no validation data, which is needed to select the best model. Give"
            f" {held_out} {usual} to hold back as much of the training data; or"
            f" {' and '.join(like_training) or ' or '.join(files)}; or {held_out} 0 to train without validation."
        )


def check_keys(options: object, names: Sequence[str], has_keys: bool) -> None:
    """Raises: ConfigError: a key or column is named, but no file has keys or columns."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if given and not has_keys:
        raise ConfigError(
            f"{given[0]} names a key or a column, but none of the files has keys or columns; leave it out."
        )


def check_output(output: Path, replace: bool) -> None:
    """Check the output folder early, so that the command does not fail at its end. Only prepared data is replaced.

    Raises: DataError: the folder exists. ConfigError: it is to be replaced, but is something else, or holds other
        files too.
    """
    check_spares_folders(output, is_folder=True)
    if not os.path.lexists(output):
        return
    if not replace:
        raise DataError(f"{output} exists already; choose another folder, or give --replace.")
    from manyheads.data.preparing import FORMAT, FORMAT_VERSION, SPLITS, read_manifest
    from manyheads.files.verify import MANIFEST

    try:
        manifest = read_manifest(output, kind=FORMAT, version=FORMAT_VERSION)
        present = {path.name for path in output.iterdir() if path.name[0] != "."}
    except DataError as error:
        raise ConfigError(f"{output} holds no prepared data, so --replace leaves it alone: {error}") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be listed, so --replace leaves it alone: {error.strerror}.") from None
    others = sorted(present - {MANIFEST, *SPLITS, *manifest["files"]})
    if others:
        raise ConfigError(
            f"{output} also holds {others[0]}, which is not of the data and which --replace would delete; move it, or"
            " choose another folder."
        )


def count_lines(counts: Mapping[str, int]) -> list[str]:
    """A line for each count that is not 0."""
    return [f"  {counts[name]:>13,} {what}" for name, what in _COUNTS.items() if counts.get(name)]


def vocabulary_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Return lines about new pieces, and if the text gave fewer pieces than requested; otherwise none."""
    made = manifest["tokenizer"]
    settings = made["settings"] or {}
    old_size = settings.get("old_size", 0)
    asked = old_size + settings["new_pieces"] if old_size else settings.get("vocab_size") or 0
    lines = []
    if old_size:
        added = made["vocab_size"] - old_size
        lines.append(f"            {added:,} new pieces, after the {old_size:,} of the tokenizer")
    if made["vocab_size"] < asked:
        few = f"{asked - old_size:,} were requested, but the training text has no more that occur often enough"
        lines.append(f"            {few}")
    return lines


def summary_of(data: Any, splits: Iterable[str], preset: str = "", vocabulary: str = "") -> str:
    """Return a summary of the prepared data, and the next command to type.

    Args:
        data: opened, a `PreparedFolder`.
        splits: the lines about all splits.
        preset: the one to train with, where a run cannot be planned.
        vocabulary: a description; empty: that of its tokenizer.
    """
    folder, tokenizer = data.path, data.tokenizer
    if not vocabulary:
        case = ", lower case" if tokenizer.lowercase else ""
        vocabulary = f"{tokenizer.kind}, {tokenizer.vocab_size:,} pieces{case}, {tokenizer.digest[:12]}"
    run = f"--run-dir runs/{folder.name}"
    command = f"--preset {preset} --data.path {folder} {run}" if preset else f"--data.path {folder} {run}"
    lines = [
        f"prepared    {folder}",
        f"digest      {data.digest}",
        f"vocabulary  {vocabulary}",
        *splits,
        "",
        *([] if preset else ["train plans a run of 20 minutes for this data and this machine, or of --minutes M"]),
        f"next: manyheads train {command}",
    ]
    return "\n".join(lines)
