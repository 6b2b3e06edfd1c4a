"""The table of tasks, and the task of a folder, which is told without torch."""

import dataclasses
import json
from pathlib import Path

import pytest

from manyheads.catalogue import ARCHITECTURES, MODEL_TASKS, PRESETS, RUNS, TASKS, Task, load
from manyheads.cli.commands.task_commands import _fitting, parse_for_task
from manyheads.config.files import Source, to_yaml
from manyheads.errors import ConfigError
from manyheads.extras.research.duplication_task.objective import DuplicationObjective
from manyheads.extras.research.presets import duplication
from manyheads.tasks.held_out import task_of_folder
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.settings_resolution import resolve_run
from manyheads.training.run.objective import open_objective


def test_every_architecture_has_a_run_and_the_same_kind() -> None:
    assert RUNS.keys() == ARCHITECTURES.keys()
    for name, entry in ARCHITECTURES.items():
        assert entry.config.task == entry.task
        made = RUNS[name]()
        assert made.task == {"language-modelling": "text"}.get(entry.task, entry.task)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_has_its_modules(name: str) -> None:
    assert callable(TASKS[name].module("objective").open_objective)
    assert callable(load(MODEL_TASKS[TASKS[name].model_task].synthetic_run))
    assert callable(TASKS[name].module("evaluate").evaluate)
    assert callable(TASKS[name].module("score").score)
    assert dataclasses.is_dataclass(TASKS[name].module("options").EVALUATE.options)
    assert dataclasses.is_dataclass(TASKS[name].module("options").SCORE.options)
    assert dataclasses.is_dataclass(TASKS[name].module("options").PREPARE.options)
    assert callable(TASKS[name].module("prepare").preparation)
    assert callable(TASKS[name].module("prepare").summary)


@pytest.mark.parametrize("member", ["lighter", "judge_sets", "describe"])
def test_an_objective_without_a_method_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, member: str) -> None:
    """Whenever a run begins, and so by the tests that train every preset; not only when the method is called."""
    config = duplication()
    assert open_objective(config, tmp_path).task == "duplication"
    monkeypatch.delattr(DuplicationObjective, member)
    with pytest.raises(AssertionError, match="DuplicationObjective lacks a part of the interface"):
        open_objective(config, tmp_path)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_names_a_task(name: str) -> None:
    config = PRESETS[name]()
    assert isinstance(config, TASKS[config.task].config)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("inner", ["", "model"])
def test_the_task_of_a_folder(tmp_path: Path, architecture: str, inner: str) -> None:
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architecture": architecture}))
    task = ARCHITECTURES[architecture].task
    assert task_of_folder(str(tmp_path)) == {"language-modelling": "text"}.get(task, task)


def test_a_parser_is_recognised_by_its_task_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "transformer"}))
    (tmp_path / "task.json").write_text('{"name": "parsing"}')
    assert task_of_folder(str(tmp_path)) == "parsing"


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_model_records_its_task(tmp_path: Path, task: str) -> None:
    """What is recorded counts, whatever the other files look like."""
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "transformer", "task": task}))
    (tmp_path / "task.json").write_text("{}")
    assert task_of_folder(str(tmp_path)) == task


@pytest.mark.parametrize("task", ["tagging", ["text"], {"name": "text"}, 3])
def test_a_task_that_this_version_does_not_know(tmp_path: Path, task: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "transformer", "task": task}))
    assert task_of_folder(str(tmp_path)) is None
    for command in ("evaluate", "score"):  # and is not taken for the architecture's usual task
        with pytest.raises(ConfigError, match=r"is unknown; there are translation.* install the plug-in, or give"):
            parse_for_task(command, [str(tmp_path)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingConfig(TextConfig):
    """The settings of a task of its own."""

    @property
    def task(self) -> str:  # type: ignore[override]
        return "counting"


def counting_preset() -> CountingConfig:
    given = PRESETS["xl-debug"]()
    return CountingConfig(**{item.name: getattr(given, item.name) for item in dataclasses.fields(given)})


@pytest.fixture
def _counting(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TASKS["text"]
    counting = Task("bytes", text.folders, text.model_task, run=CountingConfig)
    monkeypatch.setattr(TASKS, "_entries", {**TASKS._entries, "counting": counting})
    monkeypatch.setattr(PRESETS, "_entries", {**PRESETS._entries, "counted": counting_preset})


@pytest.mark.usefixtures("_counting")
def test_a_preset_of_a_task_with_settings_of_its_own_begins_a_run_that_is_continued(tmp_path: Path) -> None:
    typed = Source({"run_dir": str(tmp_path), "seed": 7}, "the command line")
    begun = resolve_run(typed, preset="counted")
    assert type(begun) is CountingConfig
    assert (begun.task, begun.seed) == ("counting", 7)
    (tmp_path / "config.yaml").write_text(to_yaml(begun))
    (tmp_path / "model").mkdir()
    record = {"architecture": "transformer-xl", "task": "counting"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(record))
    assert resolve_run(Source({"run_dir": str(tmp_path)}, "the command line")) == begun
    (tmp_path / "model" / "config.json").write_text(json.dumps({**record, "task": "tallying"}))
    with pytest.raises(ConfigError, match="records the task 'tallying', which is unknown"):
        resolve_run(Source({"run_dir": str(tmp_path)}, "the command line"))


@pytest.mark.usefixtures("_counting")
def test_a_preset_that_returns_no_settings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PRESETS, "_entries", {**PRESETS._entries, "counted": dict})
    with pytest.raises(ConfigError, match=r"the preset counted is \{\}; its function must return the settings of a"):
        resolve_run(Source({}, "the command line"), preset="counted")


@pytest.mark.parametrize("settings", ["architecture: bag", "{architecture: transformer, attention: {kind: cosine}}"])
def test_a_run_whose_architecture_or_score_is_missing_names_its_plugin(settings: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"model:\n  {settings}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architecture": "bag", "plugins": ["newcomers"]}))
    with pytest.raises(ConfigError, match="The run needs newcomers: install it, or give --plugin"):
        resolve_run(Source({"run_dir": str(tmp_path)}, "the command line"))


@pytest.mark.parametrize(
    ("recorded", "task"),
    [
        (None, "translation"),
        ("translation", "translation"),
        ("parsing", "parsing"),
        ("language-modelling", "text"),
        ("classification", "classification"),
    ],
)
def test_the_task_of_prepared_data(tmp_path: Path, recorded: str | None, task: str) -> None:
    record = {"format": "manyheads.prepared"} | ({} if recorded is None else {"task": {"name": recorded}})
    (tmp_path / "manifest.json").write_text(json.dumps(record))
    assert task_of_folder(str(tmp_path)) == task


def test_an_older_run_on_the_duplication_task(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architecture": "reformer"}))
    assert task_of_folder(str(tmp_path)) == "text"
    (tmp_path / "config.yaml").write_text("data:\n  path: duplication-task\n")
    assert task_of_folder(str(tmp_path)) == task_of_folder(str(tmp_path / "model")) == "duplication"


@pytest.mark.parametrize(
    ("arguments", "task"),
    [
        (["--help"], "translation"),
        (["--hypotheses", "out", "--reference=gold"], "translation"),
        (["--hypotheses", "out", "--trees", "gold"], "parsing"),
        (["--baseline", "flat", "--train_trees", "train"], "parsing"),
        (["owner/name", "--memory-len", "3"], "text"),
        (["owner/name", "--labels", "a", "--texts", "b"], "classification"),
        (["owner/name", "--never-heard-of", "3"], "translation"),
    ],
)
def test_the_task_of_options(arguments: list[str], task: str) -> None:
    """Where no folder records a task, the options tell it."""
    assert _fitting("evaluate", arguments) == task


def test_an_option_of_another_task_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "reformer"}))
    with pytest.raises(
        ConfigError, match="--source is an option for the task translation or parsing; this is about text"
    ):
        parse_for_task("score", [str(tmp_path), "--source", "a"])
