"""Preparation of sentence pairs from text files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from manyheads.data.holdout import Rest
from manyheads.data.prepared import PreparedData
from manyheads.data.preparing import SPLITS
from manyheads.data.preparing_pairs import Pairs, prepare_corpus
from manyheads.data.readers import PairFiles
from manyheads.errors import ConfigError
from manyheads.tasks.preparation import check_holdout, chosen_vocabulary, count_lines, summary_of
from manyheads.tasks.translation.options import PairOptions, PrepareOptions
from manyheads.text.parsing import ParsingTask
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

__all__ = ["preparation", "preparation_of", "summary"]

_FORMS = ("source", "target", "tsv", "jsonl")


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.table.Task`.

    Raises: ConfigError: training or validation pairs are missing, or are given in two forms.
    """
    splits: dict[str, Pairs] = {}
    for split in SPLITS:
        prefix = "" if split == "train" else f"{split}_"
        given = {form: getattr(options, prefix + form) for form in _FORMS}
        if any(path is not None for path in given.values()):
            keys = {"source_key": options.source_key, "target_key": options.target_key}
            try:
                splits[split] = PairFiles(**given, **keys, on_bad_utf8=options.on_bad_utf8)
            except ConfigError as error:
                raise ConfigError(f"The {split} pairs: {error}") from None
    if "train" not in splits:
        raise ConfigError("There are no training pairs: give --source and --target, or --tsv, or --jsonl.")
    check_holdout(options, [f"--valid-{form}" for form in _FORMS], "--valid-count", "500")
    return preparation_of(splits, options)


def preparation_of(
    splits: dict[str, Pairs], options: PairOptions, task: ParsingTask | None = None
) -> Callable[..., dict[str, Any]]:
    """The function that prepares pairs.

    Args: splits: where each comes from. task: what is learned of targets that are trees.

    Raises: ConfigError, DataError: the tokenizer cannot be used.
    """
    tokenizer = chosen_vocabulary(options.vocabulary, TokenizerSettings, Tokenizer.load)
    if options.valid_count:
        rest = Rest(splits["train"], options.valid_count)
        splits = {**splits, "train": rest, "valid": rest.holdout}
    arguments: dict[str, Any] = {**splits, "tokenizer": tokenizer, "task": task}
    return partial(prepare_corpus, **arguments)


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `tasks.table.Task`."""
    data = PreparedData.open(folder, verify=False)
    case = ", lower case" if data.tokenizer.lowercase else ""
    vocabulary = f"{data.tokenizer.kind}, {data.tokenizer.vocab_size:,} pieces{case}, {data.tokenizer.digest[:12]}"
    lines = []
    for split, counts in manifest["counts"].items():
        num_lines, num_pairs = counts["lines"], counts["pairs"]
        lines += ["", f"{split}: {num_pairs:,} pairs kept of {num_lines:,} read"]
        lines += count_lines({**counts, "lines": 0})
        left_out = sum(counts.get(name, 0) for name in ("empty_dropped", "bad_utf8_skipped"))
        if held_back := num_lines - num_pairs - left_out:
            lines.append(f"  {held_back:>13,} held back for validation")
        for side in ("source", "target"):
            tokens, longest, unknown = (counts[f"{side}_{name}"] for name in ("tokens", "longest", "unknown"))
            noted = f", {unknown:,} unknown" if unknown else ""
            mean = tokens / max(num_pairs, 1)
            lines.append(f"  {tokens:>13,} {side} tokens: {mean:.1f} a sentence, {longest:,} the longest{noted}")
    return summary_of(folder, data.digest, vocabulary, lines, "demo")
