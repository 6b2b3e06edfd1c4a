"""release/pythons.py: which Python is taken, what a run writes into docs/versions.md, and what is not found."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def pythons() -> Any:
    spec = importlib.util.spec_from_file_location("pythons", ROOT / "release" / "pythons.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_newest_that_starts_is_taken(pythons: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pythons.find(HERE) is None
    for name, target in (("2", sys.executable), ("10", sys.executable), ("11", "/bin/false")):
        folder = tmp_path / "versions" / f"{HERE}.{name}" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(target)
    assert pythons.find(HERE) == tmp_path / "versions" / f"{HERE}.10" / "bin" / "python"


def test_a_python_that_is_not_there_is_said_and_no_failure(pythons, capsys, monkeypatch):
    monkeypatch.setattr(pythons, "find", lambda version: None)
    assert pythons.main(["3.99"]) == 0
    assert "Python 3.99: not found here, not run" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        pythons.main(["3"])
    monkeypatch.setattr(pythons, "find", lambda version: Path("python"))
    monkeypatch.setattr(pythons, "run_tests", lambda version, python: version == "3.12")
    assert pythons.main(["3.12", "3.13"]) == 1
    assert "failed with Python 3.13\n" in capsys.readouterr().err


def test_a_row_of_the_table_is_added_once(pythons: Any) -> None:
    page = pythons.PAGE.read_text(encoding="utf-8")
    row = "| 3.99.1 | 2.13.0 | Linux x86_64 | `make test` | 2026-01-01 | failed |"
    once = pythons.with_row(page, "3.99", row)
    later = row.replace("failed", "passed")
    twice = pythons.with_row(once, "3.99", later)
    assert (once.count(row), twice.count(row), twice.count(later)) == (1, 0, 1)
    assert twice.replace(f"{later}\n", "") == page
    with pytest.raises(SystemExit, match="no table"):
        pythons.with_row("# A page\n", "3.12", row)


def test_the_classifiers_name_what_ran_whole(pythons: Any) -> None:
    page = pythons.PAGE.read_text(encoding="utf-8")
    row = r"^\| (3\.\d+)(?:\.\d+)? \|.*\| `(?:make test|\.ci/run)`[^|]*\|[^|]*\| passed\b.*\|$"
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    named = [one.rpartition(" ")[2] for one in classifiers if re.search(r"Python :: 3\.\d+$", one)]
    assert named == sorted(set(re.findall(row, page, re.MULTILINE)))
