"""The benchmark of the program's start: each command beside the bare interpreter of the same round."""

import json
import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def start_up(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("start_up")


def test_rounds_are_compared_one_by_one(start_up: ModuleType) -> None:
    found = {start_up.BARE: [1.0, 2.0, 3.0], "help": [1.5, 2.1, 3.4]}
    assert start_up.over_bare(found) == {"help": {"median_seconds": 0.4, "lowest_seconds": 0.1}}


@pytest.mark.one_in(3, "benchmarks in processes")
def test_every_command_is_run(start_up, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["start_up.py", "--rounds", "1", "--json", str(tmp_path / "found.json")])
    assert start_up.main() == 0
    record = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert record["over_bare"].keys() == set(start_up.COMMANDS) - {start_up.BARE}
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in record["seconds"].values())
    assert len(capsys.readouterr().out.splitlines()) == len(start_up.COMMANDS)
