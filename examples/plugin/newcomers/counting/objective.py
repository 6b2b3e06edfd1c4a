"""The objective of a text, under another name."""

from __future__ import annotations

from pathlib import Path

from manyheads.tasks.language_modelling.objective import LanguageObjective
from newcomers.counting.settings import CountingConfig


class CountingObjective(LanguageObjective):
    """See `Objective`."""

    def __init__(self, config: CountingConfig, data_dir: Path) -> None:
        super().__init__(config, data_dir)
        self.task = "counting"


def open_objective(config: CountingConfig, data_dir: Path, progress: object = None) -> CountingObjective:
    """See `training.run.objective.open_objective`."""
    return CountingObjective(config, data_dir)
