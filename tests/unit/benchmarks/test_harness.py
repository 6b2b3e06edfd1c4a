"""The protocol of the benchmarks: sides in turn, failures told, ratios of the same round, tables."""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parents[2] / "benchmarks"
Import = Callable[[str], ModuleType]


@pytest.fixture
def harness(benchmark_module: Import) -> ModuleType:
    return benchmark_module("harness")


def side(harness: ModuleType, name: str, build: str, /, **options: Any) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return harness.Side(name, f"trivial_sides:{build}", options, sys.executable, environment)


def sleeper(harness: ModuleType, name: str, milliseconds: float, log: Path, /, **options: Any) -> Any:
    return side(harness, name, "sleeper", name=name, milliseconds=milliseconds, log=str(log), **options)


def test_sides_take_turns(harness: ModuleType, tmp_path: Path) -> None:
    """Each works while the others wait; what libraries print does not come between."""
    log = tmp_path / "log"
    sides = [(sleeper(harness, "a", 5, log), 0.02), (sleeper(harness, "b", 10, log, chatty=True), 0.02)]
    found = harness.take_turns(sides, rounds=3)
    turns = "".join(name for name, _ in itertools.groupby(log.read_text()))
    assert turns == "ab" * 4  # the first of each is its warm-up
    for name in "ab":
        assert len(found[name].rates) == 3
        assert min(found[name].rates) > 0
        assert found[name].peak_bytes > 1 << 20
        assert found[name].extras == {"seven": [7.0, 7.0, 7.0]}
        assert found[name].about["parameters"] == 100
        assert not found[name].failure
    assert max(found["a"].rates) <= 10 / 0.005
    ratio = harness.spread(found["a"].rates, found["b"].rates)
    assert 0 < ratio.lowest <= ratio.median <= ratio.highest


def test_a_side_that_fails_says_why_and_the_others_go_on(harness: ModuleType, tmp_path: Path) -> None:
    sides = [
        (side(harness, "broken", "broken"), 0.0),
        (side(harness, "mortal", "mortal", steps=2), 0.0),
        (sleeper(harness, "a", 1, tmp_path / "log"), 0.0),
    ]
    told: list[str] = []
    found = harness.take_turns(sides, rounds=4, told=told.append)
    assert "no such model, sorry" in found["broken"].failure
    assert "out of memory" in found["mortal"].failure
    assert found["broken"].rates == found["mortal"].rates == []
    assert len(found["a"].rates) == 4
    assert any("sorry" in text for text in told)


def test_a_side_that_does_not_answer_is_killed(harness: ModuleType, tmp_path: Path) -> None:
    child = sleeper(harness, "slow", 60_000, tmp_path / "log")
    with pytest.raises(harness.SideError, match="slow gave no answer for 1 s"):
        harness.Child(child, build_seconds=1.0)


def test_spread_is_of_the_ratios_within_a_round(harness: ModuleType) -> None:
    """A slow round of both sides changes nothing."""
    ratio = harness.spread([30.0, 3.0, 40.0], [10.0, 1.0, 10.0])
    assert (ratio.median, ratio.lowest, ratio.highest) == (3.0, 3.0, 4.0)
    assert harness.spread([1.0, 2.0], factor=10).median == 15
    with pytest.raises(ValueError, match="2 rounds against 1"):
        harness.spread([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="0 rounds"):
        harness.spread([])


def test_table(harness: ModuleType) -> None:
    lines = harness.markdown_table(("side", "rate"), [["ours", "12"], ["a peer", "3"]])
    assert lines == ["| side   | rate |", "|--------|-----:|", "| ours   |   12 |", "| a peer |    3 |"]


def turns(harness: ModuleType, rates: list[float], **about: Any) -> Any:
    return harness.Turns(about=about, rates=rates, peak_bytes=3 << 20)


def test_tables_of_a_comparison(harness: ModuleType, benchmark_module: Import) -> None:
    """Ratios, shares of the machine's products, parameters; columns that nobody fills are left out."""
    run, tasks = benchmark_module("run"), benchmark_module("tasks")
    entries = (tasks.Entry("ours", "x:y"), tasks.Entry("peer", "x:y", where="peers"), tasks.Entry("lost", "x:y"))
    comparison = tasks.Comparison("a title", "tokens/s", entries, (("ours", "peer"), ("ours", "lost")))
    assert comparison.needs_peers
    found = {
        "ours": turns(harness, [200.0, 220.0], precision="bf16", parameters=104, flops=1e9, units=2.0, threads=2),
        "peer": turns(harness, [100.0, 100.0], precision="fp32", parameters=100),
        "lost": harness.Turns(failure="lost has ended: no memory"),
        run.PRODUCTS["bf16"]: turns(harness, [1e12, 1e12]),
        run.PRODUCTS["fp32"]: turns(harness, [2e11, 2e11]),
    }
    text = "\n".join(run.tables(comparison, found))
    assert "2.10 x (2.00 to 2.20)" in text
    assert "10.5% of bf16" in text  # 210 tokens/s at 0.5 GFLOP a token, of 1,000 GFLOP/s
    assert "1,000 (1,000 to 1,000) GFLOP/s" in text
    assert "lost" not in text
    said = json.loads(json.dumps(run.record("task", comparison, found)))
    assert said["ratios"] == [{"ours": "ours", "peer": "peer", "median": 2.1, "lowest": 2.0, "highest": 2.2}]
    assert said["sides"]["ours"]["share_of_bf16"]["median"] == pytest.approx(0.105)
    assert said["sides"]["lost"]["failure"] == "lost has ended: no memory"
    found["peer"].about["parameters"] = 98
    with pytest.raises(run.SizeError, match="ours has 104 parameters, peer 98: more than 5% apart"):
        run.tables(comparison, found)
    assert run.tables(replace(comparison, other_kind=("peer",)), found)


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (45.67, "45.7"), (0.5, "0.50"), (0.01234, "0.01234"), (0.0, "0.00000")]
)
def test_figures_have_the_places_they_deserve(
    harness: ModuleType, benchmark_module: Import, value: float, text: str
) -> None:
    assert benchmark_module("run").number(harness.Spread(value, value, value)) == f"{text} ({text} to {text})"


def test_header_has_date_hardware_and_commit(benchmark_module: Import) -> None:
    run = benchmark_module("run")
    machine = run.describe_machine()
    text = "\n".join(run.header({"machine": machine, "rounds": 5, "seconds": 4.0}))
    for part in (machine["date"], machine["cpu"], machine["commit"], f"torch {machine['torch']}", "5 rounds", "4 s"):
        assert part in text


@cache
def functions_of(module: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((BENCHMARKS / f"{module}.py").read_text("utf-8"))
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}


def test_every_side_of_every_task_can_be_called(benchmark_module: Import) -> None:
    """Builders exist and take their options; pairs name sides. (They are not imported: they set the machine up.)"""
    tasks = benchmark_module("tasks").TASKS
    for comparison in itertools.chain(*tasks.values()):
        names = [entry.name for entry in comparison.entries]
        assert len(set(names)) == len(names)
        assert {name for pair in comparison.pairs for name in pair} <= set(names)
        for entry in comparison.entries:
            module, _, function = entry.build.partition(":")
            defined = functions_of(module)[function]
            parameters = [argument.arg for argument in defined.args.args]
            needed = parameters[: len(parameters) - len(defined.args.defaults)]
            given = {*entry.options, *(["folder"] if entry.shares else [])}
            assert set(needed) <= given <= set(parameters), entry


def test_crossing(benchmark_module: Import) -> None:
    curve = benchmark_module("reformer_curve")

    def column(*seconds: float | None) -> dict[int, Any]:
        return {1024 << place: None if one is None else curve.Cell(one, 1 << 20) for place, one in enumerate(seconds)}

    assert "from about 1,448 " in curve.crossing(column(2.0, 2.0), column(1.0, 4.0))
    assert "every measured length, from 1,024" in curve.crossing(column(1.0, 2.0), column(3.0, None))
    assert "Slower" in curve.crossing(column(2.0), column(1.0))
    assert curve.rows({"ours": column(2.0, None)}, [1024, 2048]) == [["1,024", "2.00 s, 1 MiB"], ["2,048", "failed"]]


def test_without_the_shared_peers_the_rest_is_measured(tmp_path: Path) -> None:
    """One line says so; tables and the JSON file have the others."""
    command = [sys.executable, str(BENCHMARKS / "run.py"), "start-up", "decode-greedy", "--rounds", "1"]
    command += ["--seconds", "0", "--json", str(tmp_path / "found.json"), "--markdown", str(tmp_path / "found.md")]
    environment = {**os.environ, "MANYHEADS_SHARED": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The tasks with peers are left out: there is no ../shared/peers.py")
    assert "| manyheads --help | bare interpreter |" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert [one["task"] for one in found["tasks"]] == ["start-up"]
    assert "## Starting the program" in (tmp_path / "found.md").read_text("utf-8")


def test_an_unknown_task_is_refused() -> None:
    command = [sys.executable, str(BENCHMARKS / "run.py"), "seq2seq"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no task 'seq2seq'; there are seq2seq-train" in done.stderr
