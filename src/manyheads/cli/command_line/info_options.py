"""The options of `manyheads info`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError

__all__ = ["PAGE", "InfoOptions"]


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Options of `manyheads info`."""

    paths: tuple[Path, ...] = argument(
        "A run's folder, a model's, or prepared data; several runs are compared in one table; with --length also a file"
        " of settings, or a preset's name.",
        metavar="PATH",
    )
    sort: str | None = option(
        "With several runs: order the table by this column, the best first: bleu, valid_nll, minutes ...",
        metavar="COLUMN",
        default_is="the order given",
    )
    curves: str | None = option(
        "Also draw the learning curves of all runs in one picture: a .png, .svg or .pdf file.",
        default=None,
        metavar="FILE",
    )
    length: int | None = option(
        "Of a language model: predict the memory that training takes at segments of so many tokens.",
        default=None,
        metavar="N",
    )
    batch: int | None = option(
        "With --length: sequences read side by side at once.", metavar="N", default_is="the run's lanes"
    )
    verify: bool = option(
        "Compare every file with its SHA-256 (in a run: checkpoints and model); exit code 2 if one is damaged.",
        default=False,
    )
    json: bool = option("Print JSON.", default=False)

    @property
    def path(self) -> Path:
        """The only path. Raises: ConfigError: there are several."""
        if len(self.paths) > 1:
            raise ConfigError(f"--length and --verify take one PATH, but {len(self.paths)} were given.")
        return self.paths[0]


PAGE = CommandPage(
    InfoOptions,
    """Show what is in a model's folder, a run's folder or prepared data: parameters by part, settings,
steps, scores, digests. Several runs give one table, with the scores of their best validations.
With --length, what memory training a language model takes, before it is trained.""",
    (
        "manyheads info runs/demo",
        "manyheads info runs/demo/model --json",
        "manyheads info runs/* --sort bleu --curves compared.png",
        "manyheads info reformer-demo --length 16384 --batch 2",
    ),
)
