"""Mechanisms of numerics and crash safety, removed one by one: the test that guards each must go red.

`*.yaml` beside this file lists them: `goal`, `mechanism` (what is removed), `file`, `function` (its qualified name, or
`module` for the whole file), `pattern` (text that occurs once in the function, whatever the white space in it),
`replacement`, and `test` (what must fail). The long check applies each to a copy of the sources.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
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


def source_of(text: str, function: str) -> tuple[int, int]:
    """Where a function or class stands in the text of a module: offsets of its beginning and end, with decorators."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    body: list[ast.stmt] = parsed(text).body
    for name in function.split("."):
        found = [node for node in body if getattr(node, "name", None) == name]
        found = found or [node for node in ast.walk(ast.Module(body, [])) if getattr(node, "name", None) == name]
        [node] = [node for node in found if isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_overload(node)]
        body = node.body
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return lines[first - 1], lines[node.end_lineno or first]


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a function states the types of one kind of call only."""
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


def changed(text: str, mutant: dict[str, str]) -> str:
    """The text of a module without the mechanism.

    Raises: ValueError: the function is missing, or the pattern is not in it exactly once.
    """
    begin, end = (0, len(text)) if mutant["function"] == "module" else source_of(text, mutant["function"])
    words = r"\s+".join(re.escape(word) for word in mutant["pattern"].split())
    [place] = re.compile(words).finditer(text, begin, end)
    return text[: place.start()] + mutant["replacement"] + text[place.end() :]


def is_readable(path: Path) -> Callable[[str], object]:
    return ast.parse if path.suffix == ".py" else str


@pytest.mark.parametrize("mutant", mutants())
def test_what_it_changes_is_there(mutant: dict[str, str]) -> None:
    assert list(mutant) == ["goal", "mechanism", "file", "function", "pattern", "replacement", "test"]
    path = ROOT / mutant["file"]
    text = path.read_text(encoding="utf-8")
    without = changed(text, mutant)
    assert without != text
    is_readable(path)(without)
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
def test_removing_it_turns_its_test_red(mutant, tmp_path, shared, figure):
    for name in COPIED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    path = tmp_path / mutant["file"]
    path.write_text(changed(path.read_text(encoding="utf-8"), mutant), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(tmp_path / "src"), "MANYHEADS_SHARED": str(shared), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant["test"]]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    red = result.returncode == 1  # 1: tests ran and failed; anything else never came to the test
    figure(mutant["goal"], f"without: {mutant['mechanism']}", guard=mutant["test"], turned_red=red)
    assert red, f"pytest ended with {result.returncode}\n{result.stdout[-3000:]}{result.stderr[-1000:]}"
