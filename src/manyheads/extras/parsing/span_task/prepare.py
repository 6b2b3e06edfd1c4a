"""Preparation of trees from files for a chart parser."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from manyheads.errors import ConfigError
from manyheads.extras.parsing.parsing_text import ParsingTask
from manyheads.extras.parsing.prepared import SpanData
from manyheads.extras.parsing.preparing import prepare_spans
from manyheads.extras.parsing.span_task.options import PrepareOptions
from manyheads.extras.parsing.tree_files import TreeFile
from manyheads.tasks.preparation import chosen_vocabulary, count_lines, summary_of, vocabulary_lines
from manyheads.text.settings import ParsingSettings, TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

__all__ = ["preparation", "summary"]


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.table.Task`.

    Raises: ConfigError: the validation trees are missing, or `options.tree_root` is not a label.
    """
    if options.valid_trees is None:
        raise ConfigError(
            "There are no validation trees, which are needed to select the best model. Give --valid-trees FILE."
        )
    task = ParsingTask(ParsingSettings(tags="keep", functions=options.tree_functions, root=options.tree_root))
    files = {"train": options.trees, "valid": options.valid_trees, "test": options.test_trees}
    splits: dict[str, Any] = {
        split: TreeFile(path=path, task=task, on_bad_utf8=options.on_bad_utf8)
        for split, path in files.items()
        if path is not None
    }
    tokenizer = chosen_vocabulary(options.vocabulary, TokenizerSettings, Tokenizer.load)
    return partial(prepare_spans, **splits, tokenizer=tokenizer)


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `tasks.table.Task`."""
    data = SpanData.open(folder, verify=False)
    lines = [
        *vocabulary_lines(manifest),
        f"labels      {len(data.constituents)}, and {len(data.tags)} tags, under {data.root}",
    ]
    for split, counts in manifest["counts"].items():
        lines += ["", f"{split}: {counts['sentences']:,} trees"]
        lines += count_lines({**counts, "lines": 0, "words": 0})
        mean = counts["words"] / max(counts["sentences"], 1)
        lines.append(f"  {counts['words']:>13,} words: {mean:.1f} a sentence, {counts['longest']:,} the longest")
        lines.append(f"  {counts['constituents']:>13,} spans with a label")
        for kind in ("labels", "tags"):
            if count := counts[f"unknown_{kind}"]:
                lines.append(f"  {count:>13,} {kind} that no training tree has, which a model cannot predict")
    return summary_of(data, lines, "chart-parser")
