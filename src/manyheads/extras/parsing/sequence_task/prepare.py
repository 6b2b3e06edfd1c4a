"""Preparation of sentences and their constituent trees from files of bracketed trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyheads.data.preparing_pairs import Pairs
from manyheads.extras.parsing.parsing_text import ParsingTask
from manyheads.extras.parsing.sequence_task.options import PrepareOptions
from manyheads.extras.parsing.tree_files import TreeFile
from manyheads.tasks.preparation import check_holdout
from manyheads.tasks.translation.prepare import preparation_of, summary
from manyheads.text.settings import ParsingSettings

__all__ = ["preparation", "summary"]


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.table.Task`.

    Raises: ConfigError: the validation trees are missing, or `options.tree_root` is not a label.
    """
    check_holdout(options, ["--valid-trees"], "--valid-count", "500")
    names = ("tags", "words", "functions", "traces", "root")
    task = ParsingTask(ParsingSettings(**{name: getattr(options, f"tree_{name}") for name in names}))
    files = {"train": options.trees, "valid": options.valid_trees, "test": options.test_trees}
    splits: dict[str, Pairs] = {
        split: TreeFile(
            path=path, task=task, subtrees=options.subtrees if split == "train" else 0, on_bad_utf8=options.on_bad_utf8
        )
        for split, path in files.items()
        if path is not None
    }
    return preparation_of(splits, options, task)
