"""The table of tasks, and the task of a folder, which is told without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyheads.architectures.table import ARCHITECTURES
from manyheads.cli.command_line.model_task import task_of_arguments
from manyheads.tasks.presets import PRESETS
from manyheads.tasks.table import RUNS, TASKS, task_of, task_of_model


def test_every_architecture_has_a_run_and_the_same_kind() -> None:
    assert RUNS.keys() == ARCHITECTURES.keys()
    for name, entry in ARCHITECTURES.items():
        assert entry.config.task == entry.task
        made = RUNS[name]()
        assert (made.task == "translation") == (entry.task == "translation")


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_has_its_modules(name: str) -> None:
    assert callable(TASKS[name].module("objective").open_objective)
    assert callable(TASKS[name].module("plan").fit)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_names_a_task(name: str) -> None:
    config = PRESETS[name]()
    assert isinstance(config, task_of(config).config)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("inner", ["", "model"])
def test_the_task_of_a_folder(tmp_path: Path, architecture: str, inner: str) -> None:
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architecture": architecture}))
    expected = "text" if ARCHITECTURES[architecture].task == "language-modelling" else "translation"
    assert task_of_model(str(tmp_path)) == task_of_arguments(["--json", "other", str(tmp_path)]) == expected


def test_a_parser_is_recognised_by_its_task_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "transformer"}))
    (tmp_path / "task.json").write_text("{}")
    assert task_of_model(str(tmp_path)) == "parsing"
