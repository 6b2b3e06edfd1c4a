"""Options of `manyheads prepare` for translation: those of the task, and data by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyheads.config.options import group
from manyheads.extras.research.translation_task.options import EVALUATE, SCORE
from manyheads.extras.sources.options import SourceOptions
from manyheads.tasks.translation import options as task

__all__ = ["EVALUATE", "PREPARE", "SCORE", "PrepareOptions"]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(task.PrepareOptions):
    """Options of `manyheads prepare --task translation`."""

    sources: SourceOptions = group(SourceOptions)


PREPARE = replace(
    task.PREPARE,
    options=PrepareOptions,
    examples=(
        *task.PREPARE.examples,
        "manyheads prepare --from multi30k-en-de --valid-from multi30k-en-de --source-lang en --target-lang de"
        " --dry-run --output data/m30k",
    ),
)
