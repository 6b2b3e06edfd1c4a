"""`make bench`: what is measured, what is left out on a slow machine, and what is printed and written."""

import ast
import itertools
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SLOW = "bf16 products run at 1.1 GFLOP/s here, fp32 products at 142 GFLOP/s"
Import = Callable[[str], ModuleType]


@pytest.fixture
def harness(benchmark_module: Import) -> ModuleType:
    return benchmark_module("harness")


def turns(harness: ModuleType, rates: list[float], **about: Any) -> Any:
    return harness.Turns(about=about, rates=rates, peak_bytes=3 << 20)


def test_tables_of_a_comparison(harness: ModuleType, benchmark_module: Import) -> None:
    """Ratios, shares of the machine's products, parameters; columns that nobody fills are left out."""
    report, tasks = benchmark_module("report"), benchmark_module("tasks")
    entries = (tasks.Entry("ours", "x:y"), tasks.Entry("peer", "x:y", where="peers"), tasks.Entry("lost", "x:y"))
    comparison = tasks.Comparison("a title", "tokens/s", entries, (("ours", "peer"), ("ours", "lost")))
    assert comparison.needs_peers
    found = {
        "ours": turns(harness, [200.0, 220.0], precision="bf16", parameters=104, flops=1e9, units=2.0, threads=2),
        "peer": turns(harness, [100.0, 100.0], precision="fp32", parameters=100),
        "lost": harness.Turns(failure="lost has ended: no memory"),
        report.PRODUCTS["bf16"]: turns(harness, [1e12, 1e12]),
        report.PRODUCTS["fp32"]: turns(harness, [2e11, 2e11]),
    }
    text = "\n".join(report.tables(comparison, found))
    assert "2.10 x (2.00 to 2.20)" in text
    assert "10.5% of bf16" in text  # 210 tokens/s at 0.5 GFLOP a token, of 1,000 GFLOP/s
    assert "1,000 (1,000 to 1,000) GFLOP/s" in text
    assert "lost" not in text
    said = json.loads(json.dumps(report.record("task", comparison, found)))
    assert said["ratios"] == [{"ours": "ours", "peer": "peer", "median": 2.1, "lowest": 2.0, "highest": 2.2}]
    assert said["sides"]["ours"]["share_of_bf16"]["median"] == pytest.approx(0.105)
    assert said["sides"]["lost"]["failure"] == "lost has ended: no memory"
    found["peer"].about["parameters"] = 98
    with pytest.raises(report.SizeError, match="ours has 104 parameters, peer 98: more than 5% apart"):
        report.tables(comparison, found)
    assert report.tables(replace(comparison, other_kind=("peer",)), found)


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (45.67, "45.7"), (0.5, "0.50"), (0.01234, "0.01234"), (0.0, "0.00000")]
)
def test_figures_have_the_places_they_deserve(harness, benchmark_module, value, text):
    assert benchmark_module("report").number(harness.Spread(value, value, value)) == f"{text} ({text} to {text})"


def test_header_has_date_hardware_class_and_commit(benchmark_module: Import) -> None:
    report = benchmark_module("report")
    machine = report.describe_machine({"class": "avx2", "fp32": 142e9, "bf16": 1.1e9})
    found = {"machine": machine, "rounds": 5, "seconds": 4.0, "left_out": []}
    text = "\n".join(report.header(found))
    parts = (
        "Class of machine: avx2",
        "fp32 142 GFLOP/s, bf16 1.1 GFLOP/s",
        f"torch {machine['torch']}",
        "5 rounds",
        "4 s",
    )
    for part in (machine["date"], machine["cpu"], machine["commit"], *parts):
        assert part in text
    assert "left out" not in text
    assert "2 sides were left out" in "\n".join(report.header({**found, "left_out": [{}, {}]}))
    unseen = report.describe_machine({})
    assert (unseen["class"], unseen["rates"]) == ("unknown", {})
    assert "not measured" in "\n".join(report.header({**found, "machine": unseen}))


def test_bf16_is_left_out_where_its_products_are_far_slower(benchmark_module: Import) -> None:
    why = benchmark_module("run").why_not_bf16
    assert why({"fp32": 142e9, "bf16": 1.1e9}) == SLOW
    assert why({"fp32": 190e9, "bf16": 780e9}) == ""
    assert why({"fp32": 100e9, "bf16": 60e9}) == ""
    assert why({}) == ""


def test_every_side_in_bf16_is_known_beforehand(benchmark_module: Import) -> None:
    """Names say it in nearly all tasks, titles in the rest."""
    for comparison in itertools.chain(*benchmark_module("tasks").TASKS.values()):
        for entry in comparison.entries:
            named = "bf16" in entry.name or (", bf16:" in comparison.title and "fp32" not in entry.name)
            assert entry.in_bf16 == named, (comparison.title, entry)


def test_sides_in_bf16_are_left_out(harness, benchmark_module, monkeypatch):
    """They are not started, the machine's own products among them; the tables name them, and so does the record."""
    run, report, tasks = (benchmark_module(name) for name in ("run", "report", "tasks"))
    entries = tuple(
        tasks.Entry(f"ours, {precision}", "x:y", {"precision": precision}) for precision in ("bf16", "fp32")
    )
    entries += (tasks.Entry("peer, bf16", "x:y", {"bf16": True}), tasks.Entry("peer, fp32", "x:y", {"bf16": False}))
    pairs = (("ours, bf16", "peer, bf16"), ("ours, fp32", "peer, fp32"))
    comparison = tasks.Comparison("a title", "tokens/s", entries, pairs, pace=0.5, step_seconds=1.0)
    asked: list[tuple[list[str], float]] = []

    def take_turns(sides: list[Any], rounds: int, on_progress: Any, most_seconds: float) -> dict[str, Any]:
        asked.append(([one.name for one, _ in sides], most_seconds))
        return {one.name: turns(harness, [3.0] * rounds) for one, _ in sides}

    monkeypatch.setattr(run, "take_turns", take_turns)
    options = Namespace(seconds=4.0, rounds=2, peer_python=sys.executable, baseline_folder=None)
    found = run.measure(comparison, options, SLOW, lambda _: None)
    assert asked == [(["ours, fp32", "peer, fp32", report.PRODUCTS["fp32"]], 2.0 * run.BUDGETS)]
    text = "\n".join([*report.tables(comparison, found), *report.reasons(found)])
    assert f"Left out as too slow on this machine: ours, bf16; peer, bf16. Reason: {SLOW}." in text
    assert "1.00 x (1.00 to 1.00)" in text
    said = report.record("task", comparison, found)
    assert said["sides"]["ours, bf16"]["left_out"] == SLOW
    assert len(said["ratios"]) == 1

    only = replace(comparison, entries=entries[::2], pairs=pairs[:1])
    found = run.measure(only, options, SLOW, lambda _: None)
    assert len(asked) == 1  # nothing was started for the machine's products alone
    assert report.tables(only, found) == []
    assert len(report.reasons(found)) == 1


@pytest.mark.parametrize(
    ("capability", "amx", "bf16", "most", "found"),
    [
        ("AVX2", False, False, "", "avx2"),
        ("AVX512", True, True, "", "amx"),
        ("AVX512", True, True, "AVX512_CORE_BF16", "avx512_bf16"),
        ("AVX512", True, True, "AVX512_CORE", "avx512"),
        ("AVX512", False, True, "", "avx512_bf16"),
        ("AVX512", False, False, "", "avx512"),
        ("AVX2", True, True, "AVX2", "avx2"),  # as torch is told by ATEN_CPU_CAPABILITY
        ("DEFAULT", False, False, "", "default"),
    ],
)
def test_class_of_a_machine(benchmark_module, capability, amx, bf16, most, found):
    assert benchmark_module("machine").classify(capability, amx, bf16, most) == found


@cache
def functions_of(module: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((BENCHMARKS / f"{module}.py").read_text("utf-8"))
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}


def test_sides_of_a_baseline_run_the_code_of_its_commit(benchmark_module: Import) -> None:
    """Peers give way to our own sides at the commit; one that leaves something for ours stays."""
    run, tasks = benchmark_module("run"), benchmark_module("tasks")
    [decoding] = tasks.TASKS["decode-greedy"]
    compared = tasks.against_baseline(decoding, "abc123")
    peers = [entry.name for entry in compared.entries if entry.where == "peers"]
    assert peers == ["transformers MarianMT, fp32"]
    assert ("manyheads, fp32", "manyheads, fp32, at abc123") in compared.pairs
    assert {name for pair in compared.pairs for name in pair} | set(peers) == {one.name for one in compared.entries}
    old = next(entry for entry in compared.entries if entry.where == "baseline")
    with run.checkout("HEAD") as folder:
        side = run.side_of(old, "peer", folder)
        assert side.environment["PYTHONPATH"] == str(folder / "src")
        assert (side.folder / "side.py").is_file()
        assert (folder / "src" / "manyheads" / "__init__.py").is_file()
    assert not folder.exists()
    with pytest.raises(SystemExit, match="--baseline no-such-commit could not be read"), run.checkout("no-such-commit"):
        pass


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


@pytest.mark.one_in(3, "benchmarks in processes")
def test_without_the_shared_peers_the_rest_is_measured(tmp_path: Path) -> None:
    """One line says so; tables and the JSON file have the others."""
    command = [sys.executable, str(BENCHMARKS / "run.py"), "start-up", "decode-greedy", "--rounds", "1"]
    command += ["--seconds", "0", "--json", str(tmp_path / "found.json"), "--markdown", str(tmp_path / "found.md")]
    environment = {**os.environ, "MANYHEADS_SHARED": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The tasks with peers are left out (decode-greedy): there is no ../shared/peers.py")
    assert "| manyheads --help | bare interpreter |" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert [one["task"] for one in found["tasks"]] == ["start-up"]
    assert found["machine"]["class"] != "unknown"
    assert set(found["machine"]["rates"]) == {"fp32", "bf16"}
    assert min(found["machine"]["rates"].values()) > 0
    assert found["left_out"] == []
    assert "## Starting the program" in (tmp_path / "found.md").read_text("utf-8")


def test_an_unknown_task_is_refused() -> None:
    command = [sys.executable, str(BENCHMARKS / "run.py"), "seq2seq"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no task 'seq2seq'; there are seq2seq-train" in done.stderr
