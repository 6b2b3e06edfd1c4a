"""Every part of `benchmarks/gpu.py` runs, on a CPU and at the smallest sizes, and finished parts are not repeated."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FACTS = ["correct", "profile-base", "profile-demo", "profile-xl"]
PARTS = ["ceilings", "base", "base-real", "demo", "big", "xl", "reformer-16k", "reformer-64k", "reformer-256k"]


def check(part: dict[str, Any]) -> None:
    errors = {name: side["error"] for name, side in part["sides"].items() if "error" in side}
    assert errors.keys() <= {"MarianMT"}, errors
    assert all(ratio["lowest"] <= ratio["median"] <= ratio["highest"] for ratio in part["ratios"].values())


# One training part stands for the others, which differ in sizes and peers; all of them run in the long check.
@pytest.mark.parametrize("name", [*PARTS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in PARTS[2:])])
def test_a_part_runs(gpu: Any, name: str) -> None:
    part = gpu.PARTS[name](gpu.Options("cpu", True, 0.0, 1))
    check(part)
    assert bool(part["ratios"]) == (name != "ceilings")


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.compiles
def test_decoding_runs(gpu: Any) -> None:
    check(gpu.PARTS["decode-greedy"](gpu.Options("cpu", True, 0.0, 1)))


def test_no_part_was_forgotten(gpu: Any) -> None:
    assert {*PARTS, *FACTS, "decode-greedy", "ddp"} == gpu.PARTS.keys()
    assert set(gpu.FIRST) <= gpu.PARTS.keys()


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_part(gpu: Any, name: str) -> None:
    part = gpu.PARTS[name](gpu.Options("cpu", True, 0.0, 1))
    assert part["facts"]
    assert "error" not in part, part


@pytest.fixture
def run(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Calls the script in this process. Parts run in processes of their own. Returns: the exit code."""

    def call(output: Path, *more: str) -> int:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *more, "--device", "cpu", "--tiny", "--output", str(output)])
        try:
            return int(gpu.main())
        except SystemExit as left:
            return int(left.code or 0)

    return call


Run = Callable[..., int]


def test_a_finished_part_is_not_repeated(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that failed is run again."""
    output = tmp_path / "gpu.json"
    assert run(output, "ceilings") == 0, capsys.readouterr().err
    record = json.loads(output.read_text("utf-8"))
    check(record["parts"]["ceilings"])
    assert record["machine"]["torch"]
    record["parts"] |= {"ddp": record["parts"]["ceilings"], "ceilings": {"error": "took longer than 180 seconds"}}
    output.write_text(json.dumps(record), encoding="utf-8")
    run(output, "ddp", "ceilings")
    assert "ddp: already in" in capsys.readouterr().out
    after = json.loads(output.read_text("utf-8"))
    assert after["parts"]["ddp"] == record["parts"]["ddp"]
    check(after["parts"]["ceilings"])


@pytest.mark.slow
def test_ddp_over_two_processes_runs(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "gpu.json", "ddp") == 0, capsys.readouterr().err
    check(json.loads((tmp_path / "gpu.json").read_text("utf-8"))["parts"]["ddp"])


def test_results_of_another_machine_are_not_mixed(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpu.json"
    output.write_text(json.dumps({"machine": {"name": "another"}, "parts": {}}), encoding="utf-8")
    assert run(output, "ceilings") == 2
    assert "holds results with another name; give another --output" in capsys.readouterr().err


def test_an_unknown_part_is_named(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "gpu.json", "training") == 2
    assert "there is no part 'training'; the parts are ceilings," in capsys.readouterr().err
