"""Figures of the long checks, gathered in one file: `pytest --figures reliability.json`.

A test states what it counted by the fixture `figure`; the file also says whether that test passed.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

PROPERTY = "figure"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", metavar="FILE", help="write the figures that tests state into this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--figures") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Gatherer(Path(config.getoption("--figures"))), "manyheads-figures")


class Gatherer:
    """Lives in the process that hears of all tests, so it works with and without xdist."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == PROPERTY:
                stated = json.loads(str(value))
                self._figures.append(
                    {**stated, "test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
                )

    def pytest_sessionfinish(self) -> None:
        import torch

        written = {
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "figures": sorted(self._figures, key=lambda figure: (figure["goal"], figure["name"])),
        }
        self._path.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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
