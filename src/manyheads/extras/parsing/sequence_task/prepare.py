"""Preparation of sentences and their constituent trees from files of bracketed trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.data.preparing import prepare
from manyheads.data.translation.preparing import Pairs, PairSource
from manyheads.extras.parsing.tokenizer import ParsingTask, ParsingTokenizer, TreeFile
from manyheads.extras.parsing.trees import ParsingSettings
from manyheads.tasks.preparation import check_holdout, chosen_vocabulary
from manyheads.tasks.translation.prepare import summary, with_holdout
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.extras.parsing.sequence_task.options import PrepareOptions
    from manyheads.text.settings import Extension

__all__ = ["preparation", "prepare_trees", "summary"]


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.report.Task`.

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
    tokenizer = chosen_vocabulary(options.vocabulary, TokenizerSettings, Tokenizer.load)
    return partial(prepare_trees, **with_holdout(splits, options.valid_count), tokenizer=tokenizer, task=task)


def prepare_trees(
    folder: str | Path,
    *,
    tokenizer: TokenizerSettings | Tokenizer | Extension,
    task: ParsingTask,
    replace: bool = False,
    progress: Progress | None = None,
    **splits: Pairs,
) -> dict[str, Any]:
    """Make a folder of sentences and trees; see `preparing_pairs.prepare_corpus`.

    Args: task: what is learned of the trees. They are stored as text, and encoded as the task defines.
    """
    return prepare(folder, _TreeSource(splits, tokenizer, task), replace=replace, progress=progress)


class _TreeSource(PairSource):
    """See `preparing.Source`."""

    def __init__(
        self, splits: dict[str, Pairs], tokenizer: TokenizerSettings | Tokenizer | Extension, task: ParsingTask
    ) -> None:
        super().__init__(splits, tokenizer)
        self._task = task

    def learned(self, settings: TokenizerSettings) -> Tokenizer:
        pairs = ((sentence, tree) for sentence, tree in self.sample())
        return self._task.learn_tokenizer(pairs, settings, self.progress)

    def made_of(self) -> Iterable[str]:
        return (repr(self._task),)

    def learn(self) -> Tokenizer:
        self.tokenizer = tokenizer = ParsingTokenizer(super().learn(), self._task)
        return tokenizer

    def record(self) -> dict[str, Any]:
        return {**super().record(), "task": self._task.to_json()}
