"""Options of `manyheads prepare`, `manyheads evaluate` and `manyheads score` for chart parsing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.config.checks import at_least, check
from manyheads.config.options import CommandPage, Shared, group, option
from manyheads.decoding.options import DeviceOptions, EnsembleOptions
from manyheads.errors import ConfigError
from manyheads.tasks import preparation
from manyheads.tasks.translation.options import TokenizerOptions


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(preparation.PrepareOptions):
    """Options of `manyheads prepare --task spans`."""

    trees: str = option(
        "Training trees in brackets, each on a line or over several, plain or gzip; - is standard input.",
        metavar="FILE",
    )
    valid_trees: str | None = option("Validation trees.", default=None, metavar="FILE")
    test_trees: str | None = option("Test trees.", default=None, metavar="FILE")
    tree_functions: Literal["strip", "keep"] = option(
        "The part of a label after - or =, as in NP-SBJ.", default="strip"
    )
    tree_root: str = option("The label on top of every tree that a model gives.", default="ROOT", metavar="LABEL")
    vocabulary: TokenizerOptions = group(TokenizerOptions)


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """Options that name trees and say how a model reads them."""

    on_bad_utf8: Literal["fail", "replace"] = Shared.on_bad_utf8()
    max_tokens: int = option("Maximum size of a batch in words: rows x longest sentence.", default=1024, metavar="N")
    models: EnsembleOptions = group(EnsembleOptions)
    run_on: DeviceOptions = group(DeviceOptions)

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "max_tokens")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TreeOptions):
    """Options of `manyheads evaluate` for a chart parser."""

    model: str = Shared.model()
    trees: str | None = option(
        "The right trees, in brackets; the sentences are their words.", default=None, metavar="FILE"
    )
    data: str | None = option("A folder written by prepare --task spans.", metavar="DATA", default_is="the run's")
    split: Literal["test", "valid"] | None = option("Which part of the data.", default_is="test if there is one")
    output: str | None = option("Save the trees, one per line.", default=None, metavar="FILE", aliases=("-o",))
    json: bool = Shared.json()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trees is not None and (self.data is not None or self.split is not None):
            raise ConfigError("--trees names the right trees, as --data does; leave out --data and --split.")

    @property
    def inputs(self) -> tuple[str | None, ...]:
        """Files that are read."""
        return (self.trees,)


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(TreeOptions):
    """Options of `manyheads score` for a chart parser."""

    model: str = Shared.model()
    trees: str = option("Trees in brackets; - is standard input.", metavar="FILE")
    output: str = Shared.output("the scores")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Files that are read."""
        return (self.trees,)


PREPARE = CommandPage(
    PrepareOptions,
    """Convert files of bracketed trees to a folder for training a chart parser: for each sentence the words as subwords
and hashes of their beginnings and endings, the tags, and the labelled spans. Traces are left out. Labels and
tags are those of the training trees. One tokenizer is trained on the training sentences, unless --tokenizer names one.
`--task parsing` prepares the same files for a translation model, which writes trees as text.""",
    ("manyheads prepare --task spans --trees train.ptb --valid-trees dev.ptb --test-trees test.ptb -o data/ptb",),
)

EVALUATE = CommandPage(
    EvaluateOptions,
    """Evaluate a chart parser on held-out trees: labelled brackets by evalb's rules, tags, and the protocol. Trees come
from --trees or --data; without either, from the data of the run.""",
    ("manyheads evaluate runs/chart --trees test.ptb", "manyheads evaluate runs/chart --split valid --output dev.out"),
)

SCORE = CommandPage(
    ScoreOptions,
    """Compute the log-probabilities (in nats) that a chart parser gives to known trees, as one of their binary forms,
and to their tags. Each tree gives a line with two tab-separated columns: the log-probability, and
the number of words.""",
    ("manyheads score runs/chart --trees test.ptb",),
)
