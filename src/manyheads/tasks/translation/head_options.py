"""The text on which heads are judged, as options of commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.config.options import given_options, option
from manyheads.errors import ConfigError

__all__ = ["PairsOptions"]


@dataclass(frozen=True, kw_only=True)
class PairsOptions:
    """Sentence pairs on which heads are judged."""

    source: str | None = option("Source sentences, one a line, plain or gzip.", default=None, metavar="FILE")
    reference: str | None = option("Their translations, line by line.", default=None, metavar="FILE")
    data: str | None = option(
        "A folder written by prepare, embedded:tatoeba-en-de, or copy-task.",
        default=None,
        metavar="DATA",
        default_is="the run's",
    )
    split: Literal["test", "valid"] | None = option(
        "Which part of the data.", default=None, default_is="valid if there is one"
    )
    pairs: int = option("Pairs that are used at most, from the first one on.", default=200, metavar="N")

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ConfigError(f"--pairs is {self.pairs}; it must be at least 1.")
        if (self.source is None) != (self.reference is None):
            raise ConfigError("--source and --reference belong together, line by line; give both or neither.")
        if self.source is not None and (others := [n for n in given_options(self) if n in ("--data", "--split")]):
            raise ConfigError(f"--source and --reference are the text; leave out {' and '.join(others)}.")
