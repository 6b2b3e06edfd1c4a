"""Figures of the long checks, gathered in one file: `pytest --figures reliability.json`.

A test states what it counted by the fixture `figure`; the file also says whether that test passed.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

PROPERTY = "figure"


def _program() -> str:
    main = sys.modules["__main__"].__spec__
    return f"python -m {main.name}" if main is not None and main.name.startswith("fuzz.") else "pytest"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", metavar="FILE", help="write the figures that tests state into this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--figures") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Gatherer(Path(config.getoption("--figures"))), "manyheads-figures")


class Gatherer:
    """Lives in the process that hears of all tests, so it works with and without xdist.

    The file is written after every figure, so an interruption loses none. Figures of other tests in it stay.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        figures = []
        for name, value in report.user_properties:
            if name == PROPERTY:
                stated = json.loads(str(value))
                ended = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
                figures.append({**stated, **ended})
        if figures:
            add_figures(self._path, figures)


def merged(path: Path) -> dict[str, Any]:
    """The content of the file so far; empty if there is none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def add_figures(path: Path, figures: list[dict[str, Any]]) -> None:
    """Add figures to the file, each with the commit, command and machine; they replace those of the same test."""
    import torch

    about = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join([_program(), *sys.argv[1:]]),
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    content = merged(path)
    tests = {(figure["test"], figure["name"]) for figure in figures}
    kept = [one for one in content.get("figures", []) if (one["test"], one["name"]) not in tests]
    new = [{**figure, **about} for figure in figures]
    content["figures"] = sorted([*kept, *new], key=lambda one: (one["goal"], one["name"], one["test"]))
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def machine() -> str:
    """The processor, and how many of its cores this process may use."""
    names = re.findall(r"^model name\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {names[0] if names else platform.processor() or platform.machine()}"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def commit() -> str:
    """The commit that is checked out, marked if files differ from it; "unknown" outside git."""
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`figure("R2", "a reader during saves", saves=300, failures=0)`: a goal of reliability, what was done, counts."""

    def state(goal: str, name: str, **counts: object) -> None:
        record_property(PROPERTY, json.dumps({"goal": goal, "name": name, **counts}))

    return state
