"""Options of `manyheads prepare` and `manyheads evaluate` for parsing. Those of `manyheads score` are translation's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.config.options import CommandPage, given_options, option
from manyheads.errors import ConfigError
from manyheads.tasks.translation.options import SCORE, PairOptions, SearchEvaluateOptions

__all__ = ["EVALUATE", "PREPARE", "SCORE", "EvaluateOptions", "PrepareOptions"]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(PairOptions):
    """Options of `manyheads prepare --task parsing`."""

    trees: str = option(
        "Training trees in brackets, each on a line or over several, plain or gzip; - is standard input.",
        metavar="FILE",
    )
    valid_trees: str | None = option("Validation trees.", default=None, metavar="FILE")
    test_trees: str | None = option("Test trees.", default=None, metavar="FILE")
    tree_tags: Literal["XX", "keep"] = option(
        "Parts of speech in the target: XX for all of them, or their names.", default="XX"
    )
    tree_words: Literal["leave", "write"] = option(
        "Words in the target: leave them out (only their positions are learned), or write them, which "
        "helps if there are few trees.",
        default="leave",
    )
    tree_functions: Literal["strip", "keep"] = option(
        "The part of a label after - or =, as in NP-SBJ.", default="strip"
    )
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subtrees and self.valid_count:
            raise ConfigError(
                f"--subtrees {self.subtrees} with --valid-count {self.valid_count} would train on parts of the trees"
                " that are held back; give --valid-trees, or leave out --subtrees."
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SearchEvaluateOptions):
    """Options of `manyheads evaluate` for a parser."""

    trees: str | None = option(
        "The right trees, in brackets; the sentences are their words.", default=None, metavar="FILE"
    )
    data: str | None = option("A folder written by prepare --task parsing.", metavar="DATA", default_is="the run's")
    hypotheses: str | None = option(
        "Trees to evaluate instead of a model's output, one per line; an empty line is a sentence without a tree.",
        default=None,
        metavar="FILE",
    )
    baseline: Literal["flat", "right"] | None = option(
        "Evaluate trees that need no model: flat or right-branching ones with the most frequent "
        "labels of the training trees.",
        default=None,
    )
    train_trees: str | None = option(
        "Training trees, whose labels --baseline counts.", metavar="FILE", default_is="of --data"
    )

    def __post_init__(self) -> None:
        if self.baseline is None and self.train_trees is not None:
            raise ConfigError("--train-trees is used by --baseline only; leave it out, or give --baseline.")
        unused = given_options(self.models, self.run_on, self.decoding)
        if unused and (self.hypotheses is not None or self.baseline is not None):
            judged = "--hypotheses" if self.hypotheses is not None else "--baseline"
            raise ConfigError(f"With {judged} there is no model to run; leave out {', '.join(unused)}.")
        if self.trees is not None and (self.data is not None or self.split is not None):
            raise ConfigError("--trees names the right trees, as --data does; leave out --data and --split.")
        given = [self.hypotheses is not None, self.baseline is not None, bool(self.model)]
        if sum(given) != 1 and not (self.baseline is not None and self.model and self.hypotheses is None):
            raise ConfigError("Say what to evaluate, one of: a MODEL, --hypotheses FILE, or --baseline flat|right.")

    @property
    def inputs(self) -> tuple[str | None, ...]:
        """Files that are read."""
        return self.trees, self.hypotheses, self.train_trees


PREPARE = CommandPage(
    PrepareOptions,
    """Convert files of bracketed trees to a folder of tokens for training: sentences, and their trees as targets.
One tokenizer is trained on both sides of the training data, unless --tokenizer names one.""",
    (
        "manyheads prepare --task parsing --trees train.ptb --valid-trees dev.ptb --test-trees test.ptb -o data/ptb",
        "manyheads prepare --task parsing --trees train.ptb --valid-count 500 --tree-tags keep -o data/ptb-tags",
    ),
)

EVALUATE = CommandPage(
    EvaluateOptions,
    """Evaluate a parser on held-out trees: labelled brackets by evalb's rules, the likelihood of the correct trees, and
the protocol. The protocol lists all settings that must be equal for two scores to be comparable. Trees come from
--trees or --data; without either, from the data of the run. --hypotheses evaluates trees of another program, --baseline
trees that need no model.""",
    (
        "manyheads evaluate runs/parser --trees test.ptb",
        "manyheads evaluate --hypotheses test.out --trees test.ptb",
        "manyheads evaluate --baseline right --data data/ptb",
    ),
)
