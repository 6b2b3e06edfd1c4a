"""Options of `manyheads evaluate` for a parser. Those of `manyheads score` are a translator's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.config.options import CommandPage, argument, given_options, group, option
from manyheads.decoding.options import DecodingOptions, SearchDeviceOptions
from manyheads.errors import ConfigError
from manyheads.tasks.translation.options import SCORE

__all__ = ["EVALUATE", "SCORE", "EvaluateOptions"]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `manyheads evaluate` for a parser."""

    model: str = argument(
        "A model folder, a run folder, or owner/name on the Hugging Face hub.", default="", metavar="MODEL"
    )
    trees: str | None = option(
        "The right trees, in brackets; the sentences are their words.", default=None, metavar="FILE"
    )
    data: str | None = option(
        "A folder written by prepare --task parsing.", default=None, metavar="DATA", default_is="the run's"
    )
    split: Literal["test", "valid"] | None = option(
        "Which part of the data.", default=None, default_is="test if there is one"
    )
    hypotheses: str | None = option(
        "Trees to judge instead of a model's, one a line; an empty line is a sentence without a tree.",
        default=None,
        metavar="FILE",
    )
    baseline: Literal["flat", "right"] | None = option(
        "Judge trees that need no model: flat or right-branching ones, with the labels usual in training trees.",
        default=None,
    )
    train_trees: str | None = option(
        "Training trees, whose labels --baseline counts.", default=None, metavar="FILE", default_is="of --data"
    )
    output: str | None = option("Save the trees, one a line.", default=None, metavar="FILE", aliases=("-o",))
    json: bool = option("Print one JSON object.", default=False)
    on_bad_utf8: Literal["fail", "replace"] = option(
        "A line that is not UTF-8: fail, or replace its bad bytes.", default="fail"
    )
    run_on: SearchDeviceOptions = group(SearchDeviceOptions)
    decoding: DecodingOptions = group(DecodingOptions)

    def __post_init__(self) -> None:
        if self.baseline is None and self.train_trees is not None:
            raise ConfigError("--train-trees are counted for --baseline; leave them out.")
        unused = given_options(self.run_on, self.decoding)
        if unused and (self.hypotheses is not None or self.baseline is not None):
            judged = "--hypotheses" if self.hypotheses is not None else "--baseline"
            raise ConfigError(f"With {judged} there is no model to run; leave out {', '.join(unused)}.")
        if self.trees is not None and (self.data is not None or self.split is not None):
            raise ConfigError("--trees are the trees to judge by; leave out --data and --split.")
        given = [self.hypotheses is not None, self.baseline is not None, bool(self.model)]
        if sum(given) != 1 and not (self.baseline is not None and self.model and self.hypotheses is None):
            raise ConfigError("Say what to evaluate, one of: a MODEL, --hypotheses FILE, or --baseline flat|right.")

    @property
    def inputs(self) -> tuple[str | None, ...]:
        """Files that are read."""
        return self.trees, self.hypotheses, self.train_trees


EVALUATE = CommandPage(
    EvaluateOptions,
    """Judge a parser on held-out trees: labelled brackets by evalb's rules, likelihood of the right trees, and the
protocol: all that must be equal before two such figures may be compared. Trees come from --trees or --data; without
either, from what the run was trained with. --hypotheses judges trees made elsewhere, --baseline trees without a
model.""",
    (
        "manyheads evaluate runs/parser --trees test.ptb",
        "manyheads evaluate --hypotheses test.out --trees test.ptb",
        "manyheads evaluate --baseline right --data data/ptb",
    ),
)
