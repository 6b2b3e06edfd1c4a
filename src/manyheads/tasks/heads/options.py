"""The text on which heads are judged, and the order in which they are pruned, as options of commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from manyheads.config.checks import at_least, check
from manyheads.config.options import given_options, option
from manyheads.errors import ConfigError

__all__ = ["ORDERS", "HeadTextOptions", "Order"]

Order = Literal["importance", "ablation", "confidence", "random"]
"""`importance`: by gradient, divided by the norm of the layer (Michel et al. 2019). `ablation`: by the nats that are
lost without the head. `confidence`: by its largest weights (Voita et al. 2019). `random`: for comparison."""

ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, kw_only=True)
class HeadTextOptions:
    """Text on which heads are judged: the run's own validation data, or else."""

    source: str | None = option(
        "Translators: source sentences, one a line, plain or gzip.", default=None, metavar="FILE"
    )
    reference: str | None = option("Their translations, line by line.", default=None, metavar="FILE")
    text: str | None = option("Language models: a text file, plain or gzip.", default=None, metavar="FILE")
    data: str | None = option(
        "A folder written by prepare, or embedded data.", default=None, metavar="DATA", default_is="the run's"
    )
    split: Literal["test", "valid"] | None = option(
        "Which part of the data.", default=None, default_is="valid if there is one, for BLEU test"
    )
    pairs: int = option("Translators: pairs that are used at most, from the first one on.", default=200, metavar="N")
    max_tokens: int = option(
        "Language models: tokens that are used at most, from the first one on.", default=16_384, metavar="N"
    )
    seed: int = option("With --by random: seed of the order.", default=1, metavar="N")

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "pairs", "max_tokens")
        check(self, "--", at_least(0), "seed")
        if (self.source is None) != (self.reference is None):
            raise ConfigError("--source and --reference belong together, line by line; give both or neither.")
        files = [name for name in ("source", "text") if getattr(self, name) is not None]
        if len(files) > 1:
            raise ConfigError("--source is for translators and --text for language models; leave one out.")
        if files and (others := [name for name in given_options(self) if name in ("--data", "--split")]):
            raise ConfigError(f"--{files[0]} is the text; leave out {' and '.join(others)}.")
