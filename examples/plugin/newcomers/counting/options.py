"""Options of `manyheads prepare --task counting`; those of the other commands are a text's."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.config.options import CommandPage, option
from manyheads.tasks import preparation
from manyheads.tasks.language_modelling.options import EVALUATE, SCORE

__all__ = ["EVALUATE", "PREPARE", "SCORE"]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(preparation.PrepareOptions):
    """Options of `manyheads prepare --task counting`."""

    counted: str = option("A text file.", metavar="FILE")


PREPARE = CommandPage(
    PrepareOptions, "Prepare bytes to be counted.", ("manyheads prepare --task counting --counted a",)
)
