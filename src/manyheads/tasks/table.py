"""The tasks that a run can learn. A new task is one folder and one line here.

Nothing here imports torch: `--help` reads this table.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from manyheads.architectures.table import ARCHITECTURES
from manyheads.config.files import load_yaml
from manyheads.data.settings import DUPLICATION
from manyheads.errors import ConfigError, ModelFileError
from manyheads.extras.classification.task.settings import ClassificationConfig
from manyheads.extras.parsing.span_task.settings import SpanConfig
from manyheads.files.json_object import MOST_BYTES, read_object
from manyheads.tasks.text.settings import TextConfig
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.settings import RunConfig

__all__ = ["RUNS", "TASKS", "Task", "json_or_empty", "task_of", "task_of_folder"]


@dataclass(frozen=True)
class Task:
    """One line of the table.

    summary: one line for people. config: the settings of a run. folders: packages with the task's modules; a module
    that the first lacks is the next one's. prepared_as: the word of `prepare --task`; empty if another task's word
    covers it, or it needs no prepared data. The modules:

    - `objective.py`: `open_objective(config, data_dir, progress)` opens the data of a run.
    - `plan.py`: `Trial(config)`, training steps without the data (see `training.plan.trial.Trial`).
    - `options.py`: `PREPARE`, `EVALUATE` and `SCORE`, the options of these commands.
    - `prepare.py`: `preparation(options)` returns a function that takes `folder`, `replace` and `progress`, makes the
      folder and returns its manifest; `summary(folder, manifest)` returns the text to be printed then.
    - `evaluate.py`: `evaluate(options, progress)` returns a `tasks.report.Report`.
    - `compare.py`, if the options of `evaluate` have `others`: `compare(options, progress)` returns a report on several
      models.
    - `score.py`: `score(options, progress)` returns a `tasks.report.LineWork`.
    """

    summary: str
    config: type[RunConfig]
    folders: tuple[str, ...]
    prepared_as: str = ""

    def module(self, name: str) -> ModuleType:
        """A module of the task, imported."""
        names = [f"{folder}.{name}" for folder in self.folders]
        return importlib.import_module(next((one for one in names if importlib.util.find_spec(one)), names[-1]))


_TEXT, _TRANSLATION = "manyheads.tasks.text", "manyheads.tasks.translation"

TASKS: dict[str, Task] = {
    "translation": Task("sentences of one language to another", TrainConfig, (_TRANSLATION,), "translation"),
    "parsing": Task(
        "sentences to constituent trees",
        TrainConfig,
        ("manyheads.extras.parsing.sequence_task", _TRANSLATION),
        "parsing",
    ),
    "text": Task("the next token of a text", TextConfig, (_TEXT,), "lm"),
    "ids": Task("the next id of images, sound or events", TextConfig, (_TEXT,)),
    "duplication": Task(
        "the second half of 0w0w (Kitaev et al. 2020, sec. 2.1)",
        TextConfig,
        ("manyheads.extras.research.duplication_task", _TEXT),
    ),
    "classification": Task(
        "texts to labels", ClassificationConfig, ("manyheads.extras.classification.task",), "classification"
    ),
    "spans": Task(
        "sentences to constituent trees, by a chart", SpanConfig, ("manyheads.extras.parsing.span_task",), "spans"
    ),
}

_RUN_OF: dict[str, type[RunConfig]] = {
    "translation": TrainConfig,
    "language-modelling": TextConfig,
    "classification": ClassificationConfig,
    "spans": SpanConfig,
}

RUNS: dict[str, type[RunConfig]] = {name: _RUN_OF[entry.task] for name, entry in ARCHITECTURES.items()}
"""model.architecture -> the settings of a run that trains it."""


def task_of(config: RunConfig) -> Task:
    """The task of a run."""
    return TASKS[config.task]


def task_of_folder(name: str) -> str | None:
    """Return the task that the folder of a model, a run or prepared data records; None: it is no such folder.

    Folders of older versions record no task. There a parser has a `task.json`, a run on the duplication task names it
    as its data, and for all other models the architecture decides.
    """
    path = Path(name)
    for folder in (path / "model", path):
        record = json_or_empty(folder / "config.json")
        task = record.get("task")
        if task is not None:
            return task if isinstance(task, str) and task in TASKS else None
        run = RUNS.get(str(record.get("architecture")))
        if run is TextConfig:
            return "duplication" if _is_duplication(folder.absolute().parent) or _is_duplication(path) else "text"
        if run is ClassificationConfig:
            return "classification"
        if run is SpanConfig:
            return "spans"
        if run is not None:
            return "parsing" if (folder / "task.json").is_file() else "translation"
    return _task_of_data(path)


def _is_duplication(run: Path) -> bool:
    try:
        return load_yaml(run / "config.yaml").section("data").get("path") == DUPLICATION
    except ConfigError:
        return False  # the settings are missing or damaged; opening the run later reports the error


def _task_of_data(folder: Path) -> str | None:
    record = json_or_empty(folder / "manifest.json")
    if record.get("format") != "manyheads.prepared":
        return None
    task = record.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    if name == "language-modelling":
        return "text"
    return str(name) if name in ("parsing", "classification", "spans") else "translation"


def json_or_empty(file: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file cannot be read, as opening its folder reports that."""
    try:
        return read_object(file, most_bytes)
    except (OSError, ModelFileError):
        return {}
