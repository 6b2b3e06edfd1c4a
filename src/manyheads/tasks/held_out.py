"""The records of folders, and the held-out text on which a model is evaluated.

A folder of a model, a run or prepared data records its task; a run also its data and its settings. Held-out text is two
files, prepared data, an embedded corpus, or the run's own data. Nothing here imports torch, because `--help` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.catalogue import ARCHITECTURES, MODEL_TASKS, TASKS
from manyheads.config.build import build
from manyheads.config.files import load_yaml
from manyheads.data.settings import DUPLICATION, CopyTaskSettings
from manyheads.errors import ConfigError, DataError, ModelFileError
from manyheads.files.verify import MOST_BYTES, read_object

if TYPE_CHECKING:
    from manyheads.text.sides import LanguagePair


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


EMBEDDED = "embedded:tatoeba-en-de"
COPY_TASK = "copy-task"


def own_data(model: str, files: str = f"--source and --reference, or --data {EMBEDDED}") -> tuple[str, int]:
    """The data of a run, from its config.yaml.

    Args:
        model: a run folder, or its model/.
        files: for the message: the options that name other data.

    Returns: data.path, and the seed.
    Raises: ConfigError: there is no such file, or it names no data.
    """
    config = run_file(model)
    if config is None:
        raise ConfigError(f"{model} is no run folder, so its data is unknown; give --data FOLDER, or {files}.")
    source = load_yaml(config)
    path, seed = source.section("data").get("path"), source.values.get("seed")
    if not isinstance(path, str) or type(seed) is not int:
        raise ConfigError(f"{config} names no data; give --data FOLDER, or {files}.")
    return path, seed


def run_file(model: str) -> Path | None:
    """The config.yaml of a run.

    Args: model: a run folder, or its model/.

    Returns: None if there is no such file.
    """
    folder = Path(model)
    files = (place / "config.yaml" for place in (folder, folder.absolute().parent))
    return next((file for file in files if file.is_file()), None)


def run_section(model: str, name: str) -> dict[str, Any]:
    """Return a section of a run's config.yaml; empty if the file lacks it. For `model` and errors see `run_file`."""
    config = run_file(model)
    return {} if config is None else load_yaml(config).section(name)


def copy_settings(model: str) -> CopyTaskSettings:
    """Return `data.translation.prepared` of a run's config.yaml; the defaults without one.

    Args: model: a run folder, or its model/.

    Raises: ConfigError: the file's settings are wrong.
    """
    given = run_section(model, "data").get("copy_task") or {}
    return build(CopyTaskSettings, given, f"{run_file(model)}: data.copy_task")


def pairs_of_split(
    data: str, split: str | None, seed: int, copy_task: CopyTaskSettings | None = None
) -> tuple[list[tuple[str, str]], str]:
    """The raw text of a split of pairs.

    Args:
        data: a folder with prepared data, `embedded:tatoeba-en-de`, or `copy-task`.
        split: `test` or `valid`, of embedded pairs and the copy task also `train`; None: test, or else valid.
        seed: of the copy task's sequences.
        copy_task: its words and lengths; None: the defaults.

    Returns: the pairs in order, and the split's name.
    Raises: DataError: no such folder, damaged, or without that split. ConfigError: no such embedded corpus.
    """
    if data == EMBEDDED:
        from manyheads.data.corpora import load_tatoeba

        return load_tatoeba(split or "test"), split or "test"
    if data == COPY_TASK:
        from manyheads.data.translation.prepared import copy_pairs

        return copy_pairs(seed, settings=copy_task)[split or "test"], split or "test"
    if data.startswith("embedded:"):
        raise ConfigError(f"There is no corpus {data!r}; the embedded one is {EMBEDDED}.")
    from manyheads.data.translation.prepared import PreparedData

    prepared = PreparedData.open(data)
    texts = {"test": prepared.test_text, "valid": prepared.valid_text}
    if name := chosen_split(texts, split):
        return texts[name], name
    raise DataError(f"{data} has no {split or 'test or valid'} pairs; give --source and --reference files instead.")


def held_out_directions(data: str, split: str, num_pairs: int) -> list[tuple[LanguagePair, slice]]:
    """The direction of each stretch of a held-out split; empty for data of one direction. See `pairs_of_split`.

    Raises: DataError: the folder is missing or damaged.
    """
    if data == COPY_TASK or data.startswith("embedded:"):
        return []
    from manyheads.data.translation.prepared import PreparedData
    from manyheads.data.translation.preparing import directions_of

    return directions_of(PreparedData.open(data, verify=False).manifest, split, num_pairs)


def held_out_languages(data: str) -> list[str]:
    """The languages of the references, as far as they are recorded. See `pairs_of_split`.

    Raises: DataError: the folder is missing or damaged.
    """
    if data == COPY_TASK or data.startswith("embedded:"):
        return ["de"] if data == EMBEDDED else []
    from manyheads.data.translation.prepared import PreparedData

    return list(dict.fromkeys(target for _, target in PreparedData.open(data, verify=False).languages))


def chosen_split(splits: Mapping[str, Sized | None], split: str | None) -> str | None:
    """The split to judge on: the one that is named, else `test`, else `valid`; None: it has no content."""
    return next((name for name in ([split] if split else ["test", "valid"]) if splits[name]), None)
