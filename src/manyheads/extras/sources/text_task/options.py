"""Options of `manyheads prepare --task lm`: those of the task, and data by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyheads.config.options import group, option
from manyheads.errors import ConfigError
from manyheads.extras.research.text_task.options import EVALUATE, SCORE
from manyheads.extras.sources.options import SourceOptions
from manyheads.tasks.language_modelling import options as task

__all__ = ["EVALUATE", "PREPARE", "SCORE", "PrepareOptions"]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(task.PrepareOptions):
    """Options of `manyheads prepare --task lm`."""

    corpus: tuple[str, ...] = option(
        "Training text, plain or gzip, in this order; - is standard input. With --layout the corpus's folder or file.",
        metavar="FILE [FILE ...]",
        default=(),
    )
    sources: SourceOptions = group(SourceOptions)

    def __post_init__(self) -> None:
        given = self.corpus
        object.__setattr__(self, "corpus", given or self.sources.train)  # the task's rules are about either
        super().__post_init__()
        object.__setattr__(self, "corpus", given)
        if not self.corpus and not self.sources.train:
            raise ConfigError("Missing: --corpus, or --from, which fetches it. See manyheads prepare --task lm --help.")


PREPARE = replace(
    task.PREPARE,
    options=PrepareOptions,
    examples=(
        *task.PREPARE.examples,
        "manyheads prepare --task lm --from enwik8 --layout enwik8 --dry-run --output data/enwik8",
    ),
)
