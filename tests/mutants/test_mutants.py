"""Mechanisms of reliability, removed one by one: the test that guards each must go red.

`*.yaml` beside this file lists them: `goal`, `mechanism` (what is taken away), `file`, `old` (once in it, exactly),
`new`, and `test` (what must fail). The long check applies each to a copy of the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "tests", "pyproject.toml", "README.md", "recipes")


def mutants() -> list[Any]:
    found = []
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        for number, mutant in enumerate(yaml.safe_load(path.read_text(encoding="utf-8"))):
            found.append(pytest.param(mutant, id=f"{path.stem}-{number:02d}"))
    return found


@pytest.mark.parametrize("mutant", mutants())
def test_what_it_changes_is_there(mutant: dict[str, str]) -> None:
    assert set(mutant) == {"goal", "mechanism", "file", "old", "new", "test"}
    text = (ROOT / mutant["file"]).read_text(encoding="utf-8")
    assert text.count(mutant["old"]) == 1, f"{mutant['file']} holds it {text.count(mutant['old'])} times"
    assert mutant["old"] != mutant["new"]
    assert (ROOT / mutant["test"].partition("::")[0]).is_file()


def test_the_page_on_reliability_names_every_goal_and_the_mechanisms_of_saving() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    goals = {parameter.values[0]["goal"] for parameter in mutants()}
    for goal in goals:
        assert not goal[1:].isdecimal() or f"| {goal} |" in page, goal
    for mutant in yaml.safe_load(Path(__file__).with_name("checkpoint.yaml").read_text(encoding="utf-8")):
        guard = mutant["test"].removeprefix("tests/")
        assert f"| {mutant['goal']} | {mutant['mechanism']} | `{guard}` |" in page


@pytest.mark.slow
@pytest.mark.parametrize("mutant", mutants())
def test_removing_it_turns_its_test_red(
    mutant: dict[str, str], tmp_path: Path, shared: Path, figure: Callable[..., None]
) -> None:
    for name in COPIED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    path = tmp_path / mutant["file"]
    path.write_text(path.read_text(encoding="utf-8").replace(mutant["old"], mutant["new"]), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(tmp_path / "src"), "MANYHEADS_SHARED": str(shared), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant["test"]]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    red = result.returncode == 1  # 1: tests ran and failed; anything else never came to the test
    figure(mutant["goal"], f"without: {mutant['mechanism']}", guard=mutant["test"], turned_red=red)
    assert red, f"pytest ended with {result.returncode}\n{result.stdout[-3000:]}{result.stderr[-1000:]}"
