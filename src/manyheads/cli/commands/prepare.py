"""`manyheads prepare`: text files -> a folder of tokens that train reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.commands.prepare_ids import concerns_ids, id_work
from manyheads.cli.commands.prepare_text import TextOptions, text_summary, text_work
from manyheads.cli.lines.tree_splits import TreeOptions, parsing_task, tree_splits
from manyheads.cli.watching.interruptible import StoppedBySignalError, interruptible
from manyheads.cli.watching.phases import showing_phases
from manyheads.config.options import group, option
from manyheads.data.lines import OnBadUtf8
from manyheads.data.progress import Progress
from manyheads.data.readers import PairFiles
from manyheads.errors import ConfigError, DataError

if TYPE_CHECKING:
    from manyheads.data.preparing_pairs import Pairs
    from manyheads.text.settings import TokenizerSettings
    from manyheads.text.tokenizer import Tokenizer

__all__ = ["PrepareOptions", "run"]

SPLITS = ("train", "valid", "test")
FORMS = ("source", "target", "tsv", "jsonl")
_OF_PAIRS = (*(prefix + form for prefix in ("", "valid_", "test_") for form in FORMS), "valid_count", "kind")

_DESCRIPTION = """Turn sentence pairs into a folder of tokens that train reads: two aligned files, a TSV or a JSONL
file for each of training, validation and test; plain or gzip, UTF-8, one sentence a line. One tokenizer is trained on
both sides of the training pairs, unless --tokenizer names one. Training pairs with an empty side are left out and
counted. With --task parsing, files of bracketed trees (--trees) instead: sentences, and their trees as targets. Or,
with --task lm, a text for a language model (--corpus), as bytes, pieces of words, or words; or no text, but ids from
binary files (--format) and pictures (--layout images)."""

_EXAMPLES = (
    "manyheads prepare --source train.en --target train.de --valid-source v.en --valid-target v.de --output data/my",
    "manyheads prepare --tsv pairs.tsv --valid-count 500 --vocab-size 8000 --output data/my",
    "manyheads prepare --task parsing --trees train.ptb --valid-trees dev.ptb --test-trees test.ptb --output data/ptb",
    "manyheads prepare --task lm --corpus novel.txt --valid-bytes 50000 --output data/novel",
    "manyheads prepare --task lm --layout wikitext-2 --corpus wikitext-2 --output data/wikitext-2",
    "manyheads prepare --task lm --format u16 --corpus events.bin --valid-bytes 20000 --output data/events",
    "manyheads prepare --task lm --layout images --image-size 64 --corpus pngs --valid-bytes 1228800 -o data/pictures",
)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of `manyheads prepare`."""

    output: str = option("The folder to be made; it appears when it is whole.", metavar="DIR", aliases=("-o",))
    task: Literal["translation", "parsing", "lm"] = option(
        "What is to be learned: from text to text, from a sentence to its constituents, or a text itself.",
        default="translation",
    )
    source: str | None = option("Training sentences, one a line; - is standard input.", default=None, metavar="FILE")
    target: str | None = option("Their translations, line by line.", default=None, metavar="FILE")
    tsv: str | None = option("Training pairs, source<TAB>target.", default=None, metavar="FILE")
    jsonl: str | None = option("Training pairs, a JSON object a line.", default=None, metavar="FILE")
    valid_source: str | None = option("Validation sentences.", default=None, metavar="FILE")
    valid_target: str | None = option("Their translations.", default=None, metavar="FILE")
    valid_tsv: str | None = option("Validation pairs.", default=None, metavar="FILE")
    valid_jsonl: str | None = option("Validation pairs.", default=None, metavar="FILE")
    valid_count: int | None = option(
        "Without validation files: hold back the last N training pairs; 0 goes without validation.",
        default=None,
        metavar="N",
    )
    test_source: str | None = option("Test sentences.", default=None, metavar="FILE")
    test_target: str | None = option("Their translations.", default=None, metavar="FILE")
    test_tsv: str | None = option("Test pairs.", default=None, metavar="FILE")
    test_jsonl: str | None = option("Test pairs.", default=None, metavar="FILE")
    source_key: str = option("Key of the source sentence in JSONL files.", default="source", metavar="KEY")
    target_key: str = option("Key of its translation in JSONL files.", default="target", metavar="KEY")
    tokenizer: str | None = option(
        "Use this tokenizer.json, or the one of this model, run or data folder, and train none.",
        default=None,
        metavar="FILE",
    )
    kind: Literal["bpe", "unigram", "word"] | None = option(
        "Kind of tokenizer to train.", default=None, default_is="bpe", name="tokenizer.kind"
    )
    vocab_size: int | None = option(
        "Number of pieces, for both languages together; of a language model's words "
        "the maximum, which is unlimited by default.",
        default=None,
        metavar="N",
        default_is="8000",
        aliases=("--vocab-size",),
        name="tokenizer.vocab-size",
    )
    lowercase: bool = option(
        "Fold case before tokenizing; translations come out in lower case.",
        default=False,
        aliases=("--lowercase",),
        name="tokenizer.lowercase",
    )
    on_bad_utf8: OnBadUtf8 = option(
        "A line that is not UTF-8: fail, replace its bad bytes, or skip the pair; counted.", default="fail"
    )
    replace: bool = option("Replace prepared data of that name, once the new data is whole.", default=False)
    trees: TreeOptions = group(TreeOptions)
    text: TextOptions = group(TextOptions)


OPTIONS = (PrepareOptions,)


def run(arguments: Sequence[str]) -> int:
    """Prepare data. Returns: the exit code."""
    options = parse(PrepareOptions, arguments, command="prepare", description=_DESCRIPTION, examples=_EXAMPLES)
    output = Path(options.output)
    if not output.name:
        output = output.resolve()
    _check_output(output, options.replace)
    prepare, summary = (_text if options.task == "lm" else _pairs)(options)

    def work(progress: Progress) -> dict[str, Any]:
        return prepare(output, replace=options.replace, progress=progress)

    def abandon() -> None:
        from rich.console import Console

        from manyheads.files.commit import remove_stale

        Console(stderr=True).show_cursor()  # the bars have hidden it
        print(f"manyheads: stopped; nothing is left in {output}.", file=sys.stderr, flush=True)
        remove_stale(output.absolute().parent, output.name)

    try:
        with showing_phases() as show:
            manifest = interruptible(work, show, abandon)
    except StoppedBySignalError as stopped:
        print(f"manyheads: stopped; nothing is left in {output}.", file=sys.stderr)
        return 128 + stopped.number
    print(summary(output, manifest))
    return 0


_Parts = tuple[Callable[..., dict[str, Any]], Callable[[Path, dict[str, Any]], str]]


def _pairs(options: PrepareOptions) -> _Parts:
    """The function that prepares pairs, without folder and progress, and the one that summarises the result.

    Raises: ConfigError, DataError.
    """
    options.text.refuse()
    splits = _splits(options)
    task = parsing_task(options.trees) if options.task == "parsing" else None
    from manyheads.data.preparing_pairs import prepare_corpus

    texts = {"train": splits["train"], "valid": splits.get("valid"), "test": splits.get("test")}
    arguments: dict[str, Any] = {**texts, "tokenizer": _tokenizer(options), "task": task}
    return partial(prepare_corpus, **arguments), _summary


def _text(options: PrepareOptions) -> _Parts:
    """The same of a text for a language model."""
    options.trees.refuse()
    for name in _OF_PAIRS:
        if getattr(options, name) is not None:
            option = "--tokenizer.kind" if name == "kind" else f"--{name.replace('_', '-')}"
            instead = {"valid_count": "--valid-bytes", "kind": "--level"}.get(name, "--corpus")
            raise ConfigError(f"{option} is of sentence pairs; with --task lm give {instead}.")
    if concerns_ids(options.text):
        from manyheads.data.preparing_ids import prepare_ids

        given = options.tokenizer is not None or options.lowercase or options.on_bad_utf8 != "fail"
        return partial(prepare_ids, **id_work(options.text, options.vocab_size, of_text=given)), text_summary
    arguments = text_work(
        options.text,
        on_bad_utf8=options.on_bad_utf8,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        lowercase=options.lowercase,
    )
    from manyheads.data.preparing_text import prepare_text

    return partial(prepare_text, **arguments), text_summary


def _check_output(output: Path, replace: bool) -> None:
    """Refuse early what could only fail late, and never replace what is no prepared data.

    Raises: DataError: the folder exists. ConfigError: it is to be replaced, but is something else.
    """
    if not output.exists():
        return
    if not replace:
        raise DataError(f"{output} exists already; choose another folder, or give --replace.")
    from manyheads.data.manifest import read_manifest
    from manyheads.data.preparing import FORMAT, FORMAT_VERSION

    try:
        read_manifest(output, kind=FORMAT, version=FORMAT_VERSION)
    except DataError as error:
        raise ConfigError(f"{output} holds no prepared data, so --replace leaves it alone: {error}") from None


def _splits(options: PrepareOptions) -> dict[str, Pairs]:
    """Where each split comes from.

    Raises: ConfigError: training or validation pairs are missing, or two forms are given.
    """
    found: dict[str, Pairs] = {}
    if options.task == "parsing":
        found |= tree_splits(options.trees, options.on_bad_utf8, options.valid_count)
    else:
        options.trees.refuse()
    for split in SPLITS:
        prefix = "" if split == "train" else f"{split}_"
        given = {form: getattr(options, prefix + form) for form in FORMS}
        if not any(path is not None for path in given.values()):
            continue
        if options.task == "parsing":
            named = next(form for form, path in given.items() if path is not None)
            option = f"--{prefix}{named}".replace("_", "-")
            raise ConfigError(
                f"{option} names sentence pairs; with --task parsing give --{prefix.replace('_', '-')}trees."
            )
        keys = {"source_key": options.source_key, "target_key": options.target_key}
        try:
            found[split] = PairFiles(**given, **keys, on_bad_utf8=options.on_bad_utf8)
        except ConfigError as error:
            raise ConfigError(f"The {split} pairs: {error}") from None
    if "train" not in found:
        raise ConfigError(
            "There are no training trees: give --trees."
            if options.task == "parsing"
            else "There are no training pairs: give --source and --target, or --tsv, or --jsonl."
        )
    _refuse_shared_stdin(options)
    if ("valid" in found) == (options.valid_count is not None):
        if options.valid_count is not None:
            raise ConfigError(
                "--valid-count takes pairs from the training files; leave it out where --valid-* files are."
            )
        raise ConfigError(
            "There are no validation pairs, which tell when a model is good: give --valid-source and --valid-target (or"
            " --valid-tsv, --valid-jsonl; of trees, --valid-trees), or --valid-count 500 to hold back the last 500"
            " training pairs, or --valid-count 0 to go without."
        )
    if options.valid_count:
        from manyheads.data.holdout import Rest

        rest = Rest(found["train"], options.valid_count)
        found |= {"train": rest, "valid": rest.holdout}
    return found


def _refuse_shared_stdin(options: PrepareOptions) -> None:
    named = [
        f"--{prefix}{form}".replace("_", "-")
        for prefix in ("", "valid_", "test_")
        for form in ("source", "target", "tsv", "jsonl")
        if getattr(options, prefix + form) == "-"
    ]
    if len(named) > 1:
        raise ConfigError(f"Standard input can be read once, but {' and '.join(named)} are all -.")


def _tokenizer(options: PrepareOptions) -> TokenizerSettings | Tokenizer:
    from manyheads.config.build import build
    from manyheads.text.settings import TokenizerSettings
    from manyheads.text.tokenizer import Tokenizer

    asked = {"kind": options.kind, "vocab_size": options.vocab_size, "lowercase": options.lowercase or None}
    given = {name: value for name, value in asked.items() if value is not None}
    if options.tokenizer is None:
        return build(TokenizerSettings, given, "the tokenizer's options")
    if given:
        raise ConfigError(f"--tokenizer {options.tokenizer} is used as it is; leave out {', '.join(given)}.")
    path = Path(options.tokenizer)
    inside = (path / "tokenizer.json", path / "model" / "tokenizer.json")
    return Tokenizer.load(next((file for file in inside if file.is_file()), path))


def _summary(output: Path, manifest: dict[str, Any]) -> str:
    """All counts, and the next command to type."""
    from manyheads.data.prepared import PreparedData

    data = PreparedData.open(output, verify=False)
    case = ", lower case" if data.tokenizer.lowercase else ""
    lines = [
        f"prepared   {output}",
        f"digest     {data.digest}",
        f"tokenizer  {data.tokenizer.kind}, {data.tokenizer.vocab_size:,} pieces{case}, {data.tokenizer.digest[:12]}",
    ]
    for split, counts in manifest["counts"].items():
        lines += ["", f"{split}: {counts['pairs']:,} pairs kept of {counts['lines']:,} read"]
        lines += [f"  {counts[name]:>12,} {what}" for name, what in _NOTED.items() if counts.get(name)]
        left_out = sum(counts.get(name, 0) for name in ("empty_dropped", "bad_utf8_skipped"))
        if holdout := counts["lines"] - counts["pairs"] - left_out:
            lines.append(f"  {holdout:>12,} held back for validation")
        for side in ("source", "target"):
            tokens, pairs = counts[f"{side}_tokens"], max(counts["pairs"], 1)
            mean, longest = tokens / pairs, counts[f"{side}_longest"]
            unknown = f", {counts[f'{side}_unknown']:,} unknown" if counts[f"{side}_unknown"] else ""
            lines.append(f"  {tokens:>12,} {side} tokens: {mean:.1f} a sentence, {longest:,} the longest{unknown}")
    return "\n".join(
        [*lines, "", f"next: manyheads train --preset demo --data.path {output} --run-dir runs/{output.name}"]
    )


_NOTED = {
    "empty_dropped": "left out, because one side is empty",
    "empty_kept": "with an empty side, kept",
    "bad_utf8_replaced": "lines that were not UTF-8, bad bytes replaced",
    "bad_utf8_skipped": "left out, because they are not UTF-8",
    "line_breaks_replaced": "with line breaks inside, made spaces",
    "columns_ignored": "lines with more than two columns, the others left out",
    "control_characters": "with control characters inside (NUL, carriage return, ...), kept",
    "long_lines": "with a side above 10,000 characters, of which a tokenizer learns from the first 10,000",
}
