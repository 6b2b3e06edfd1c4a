"""The task of a run and of a folder; the tasks are in the catalogue.

Nothing here imports torch: `--help` reads this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manyheads.catalogue import ARCHITECTURES, MODEL_TASKS, TASKS
from manyheads.config.files import load_yaml
from manyheads.data.settings import DUPLICATION
from manyheads.errors import ConfigError, ModelFileError
from manyheads.files.verify import MOST_BYTES, read_object
from manyheads.training.settings import RunConfig


class _Runs(Mapping[str, type[RunConfig]]):
    """model.architecture -> the settings of a run that trains it, imported on access."""

    def __getitem__(self, name: str) -> type[RunConfig]:
        return MODEL_TASKS[ARCHITECTURES[name].task].config

    def __contains__(self, name: object) -> bool:
        return name in ARCHITECTURES

    def __iter__(self) -> Iterator[str]:
        return iter(ARCHITECTURES)

    def __len__(self) -> int:
        return len(ARCHITECTURES)


RUNS = _Runs()


def task_of_folder(name: str, *, strictly: bool = False) -> str | None:
    """Return the task that the folder of a model, a run or prepared data records; None: it is no such folder.

    Folders of older versions record no task. There a parser's task is in `task.json`, a run on the duplication task
    names it as its data, and for all other models the architecture decides.

    Args: strictly: refuse a task that is recorded and unknown, such as one of a plug-in that is not there.

    Raises: ConfigError: see strictly.
    """
    path = Path(name)
    for folder in (path / "model", path):
        record = json_or_empty(folder / "config.json")
        task = record.get("task")
        if task is not None:
            if isinstance(task, str) and task in TASKS:
                return task
            if strictly:
                raise ConfigError(
                    f"{folder / 'config.json'} records the task {task!r}, which is unknown; there are"
                    f" {', '.join(TASKS)}. If it is a plug-in's, install the plug-in, or give --plugin."
                )
            return None
        entry = ARCHITECTURES.get(str(record.get("architecture")))
        if entry is not None:
            if _is_duplication(folder.absolute().parent) or _is_duplication(path):
                return "duplication"
            named = str(json_or_empty(folder / "task.json").get("name"))
            return named if named in TASKS else MODEL_TASKS[entry.task].task
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
    return next((word for word, known in TASKS.items() if name and known.recorded_as == name), "translation")


def json_or_empty(file: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file cannot be read, as opening its folder reports that."""
    try:
        return read_object(file, most_bytes)
    except (OSError, ModelFileError):
        return {}
