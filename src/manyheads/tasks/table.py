"""The tasks that a run can learn. A new task is one folder and one line here.

Nothing here imports torch: `--help` reads this table.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from manyheads.files.guarded import read_limited
from manyheads.tasks.text.settings import TextConfig
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.settings import RunConfig

__all__ = ["RUNS", "TASKS", "Task", "task_of", "task_of_model"]

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Task:
    """One line of the table.

    summary: one line for people. config: the settings of a run. package: the folder with `objective.py`, whose
    `open_objective(config, data_dir, progress)` opens the data, and `plan.py`, whose `fit(config, limit_bytes)` finds
    the largest step.
    """

    summary: str
    config: type[RunConfig]
    package: str

    def module(self, name: str) -> ModuleType:
        """A module of the task's folder, imported."""
        return importlib.import_module(f"{self.package}.{name}")


TASKS: dict[str, Task] = {
    "translation": Task("sentences of one language to another", TrainConfig, "manyheads.tasks.translation"),
    "parsing": Task("sentences to constituent trees", TrainConfig, "manyheads.tasks.translation"),
    "text": Task("the next token of a text", TextConfig, "manyheads.tasks.text"),
    "ids": Task("the next id of images, sound or events", TextConfig, "manyheads.tasks.text"),
    "duplication": Task(
        "the second half of 0w0w (Kitaev et al. 2020, sec. 5.1)", TextConfig, "manyheads.tasks.duplication"
    ),
}

RUNS: dict[str, type[RunConfig]] = {
    "transformer": TrainConfig,
    "transformer-xl": TextConfig,
    "reformer": TextConfig,
    "reformer-seq2seq": TrainConfig,
}
"""model.architecture -> the settings of a run that trains it."""


def task_of(config: RunConfig) -> Task:
    """The task of a run."""
    return TASKS[config.task]


def task_of_model(model: str) -> str | None:
    """The task of a model's or a run's folder, by its files; None: it is not such a folder.

    A parser has a `task.json`; for all other models the architecture decides.
    """
    from manyheads.text.parsing import TASK_FILE  # imports tokenizers

    for folder in (Path(model) / "model", Path(model)):
        try:
            record = json.loads(read_limited(folder / "config.json", _MOST_BYTES).decode("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, RecursionError):
            return None  # whoever opens it reports what is wrong
        run = RUNS.get(record.get("architecture", "")) if isinstance(record, dict) else None
        if run is None:
            return None
        if run is TextConfig:
            return "text"
        return "parsing" if (folder / TASK_FILE).is_file() else "translation"
    return None
