"""The options of `prepare --task parsing`, and the files of trees that they name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from manyheads.config.options import given_options, option
from manyheads.data.lines import OnBadUtf8
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.data.preparing_pairs import Pairs
    from manyheads.text.parsing import ParsingTask

__all__ = ["TreeOptions", "parsing_task", "tree_splits"]


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """With --task parsing."""

    trees: str | None = option(
        "Training trees in brackets, each on a line or over several, plain or gzip; - is standard input.",
        default=None,
        metavar="FILE",
    )
    valid_trees: str | None = option("Validation trees.", default=None, metavar="FILE")
    test_trees: str | None = option("Test trees.", default=None, metavar="FILE")
    tree_tags: Literal["XX", "keep"] = option(
        "Parts of speech in what is learned: XX for all of them, or their names.", default="XX"
    )
    tree_words: Literal["leave", "write"] = option(
        "What is learned of the words: only where they are, or to write them too, which helps if there are few trees.",
        default="leave",
    )
    tree_functions: Literal["strip", "keep"] = option("What follows - or = in a label, as in NP-SBJ.", default="strip")
    tree_traces: Literal["strip", "keep"] = option("Leaves tagged -NONE-, which are no words.", default="strip")
    tree_root: str = option(
        "The label on top of every tree that a model gives; it is not learned.", default="ROOT", metavar="LABEL"
    )
    subtrees: int = option(
        "Train on every constituent with at least N words too, as a sentence of its own.",
        default=0,
        metavar="N",
        default_is="none",
    )

    def refuse(self) -> None:
        """Raises: ConfigError: one of these is given, where sentence pairs are prepared."""
        for name in given_options(self):
            raise ConfigError(f"{name} needs --task parsing.")


def parsing_task(options: TreeOptions) -> ParsingTask:
    """The parts of a tree that are learned.

    Raises: ConfigError: the root is no label.
    """
    from manyheads.text.parsing import ParsingTask
    from manyheads.text.settings import ParsingSettings

    return ParsingTask(
        ParsingSettings(
            tags=options.tree_tags,
            words=options.tree_words,
            functions=options.tree_functions,
            traces=options.tree_traces,
            root=options.tree_root,
        )
    )


def tree_splits(options: TreeOptions, on_bad_utf8: OnBadUtf8, valid_count: int | None) -> dict[str, Pairs]:
    """Where each split comes from; a split without a file is left out.

    Raises: ConfigError: options contradict each other.
    """
    from manyheads.data.trees import TreeFile

    if options.subtrees and valid_count:
        raise ConfigError(
            f"--subtrees {options.subtrees} with --valid-count {valid_count} would train on parts of the trees that are"
            " held back; give --valid-trees, or leave out --subtrees."
        )
    named = {"train": options.trees, "valid": options.valid_trees, "test": options.test_trees}
    if list(named.values()).count("-") > 1:
        raise ConfigError("Standard input can be read once, but several files of trees are -.")
    task = parsing_task(options)
    return {
        split: TreeFile(
            path=path, task=task, subtrees=options.subtrees if split == "train" else 0, on_bad_utf8=on_bad_utf8
        )
        for split, path in named.items()
        if path is not None
    }
