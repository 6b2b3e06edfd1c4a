"""Every part of `benchmarks/gpu.py` runs, on a CPU and at the smallest sizes, and finished parts are not repeated."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from manyheads.nn.kernels import modes, policy
from manyheads.tasks.presets import demo

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"
sys.path.append(str(SCRIPT.parent))
from gpu_sides import Options  # noqa: E402

FLAGS = ["--device", "cpu", "--tiny", "--without-compiler"]
TINY = Options("cpu", True, 0.0, 1, compiles=False)


@pytest.fixture
def gpu(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("gpu")


FACTS = ["correct", "profile-base", "profile-demo", "profile-xl"]
PARTS = ["ceilings", "base", "base-real", "demo", "big", "xl", "xl-large", "generate", "decode-greedy", "decode-beam4"]
PARTS += ["reformer-16k", "reformer-64k", "reformer-256k"]
FAST = ["ceilings", "base-real", "decode-greedy", "xl", "reformer-16k"]


def check(part: dict[str, Any]) -> None:
    errors = {name: side["error"] for name, side in part["sides"].items() if "error" in side}
    assert errors.keys() <= {"MarianMT"}, errors
    assert all(ratio["lowest"] <= ratio["median"] <= ratio["highest"] for ratio in part["ratios"].values())


# Some parts stand for the others, which differ in sizes and peers; all of them run in the long check.
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PARTS]
)
def test_a_part_runs(gpu: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The side with fewer launches takes the operations of a GPU, which a CPU computes here."""
    monkeypatch.setattr(policy, "saves_launches", lambda device: modes.is_fast() and modes.asked.saves_launches)
    part = gpu.PARTS[name](TINY)
    check(part)
    assert bool(part["ratios"]) == (name != "ceilings")
    if name == "base-real":
        assert "newstest" in part["facts"]["lengths"]


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.compiles
@pytest.mark.parametrize(
    "name", ["base", "base-real", "xl", "reformer-16k", "decode-greedy", "decode-beam4", "generate"]
)
def test_compiled_sides_run(gpu: Any, name: str) -> None:
    part = gpu.PARTS[name](replace(TINY, compiles=True))
    check(part)
    compiled = [side for side in part["sides"] if "compiled" in side]
    assert compiled
    assert len(compiled) == len(
        [side for side in part["sides"] if "compiled" in side and "step_seconds" in part["sides"][side]]
    )


def test_no_part_was_forgotten(gpu: Any) -> None:
    assert {*PARTS, *FACTS, "ddp"} == gpu.PARTS.keys() == gpu.LEAST_SECONDS.keys()
    assert set(gpu.FIRST) <= gpu.PARTS.keys()
    assert sum(gpu.LEAST_SECONDS[name] for name in gpu.FIRST) <= 9 * 60


def test_the_demo_is_the_demo(benchmark_module: Callable[[str], ModuleType]) -> None:
    found = benchmark_module("gpu_parts")._transformer_config("demo", TINY)
    wanted = demo("bf16")
    assert found == replace(wanted.model, source_vocab_size=100, target_vocab_size=100)
    assert wanted.optimiser == benchmark_module("gpu_sides").DEMO_OPTIMISER
    assert benchmark_module("gpu_parts")._transformer_config("demo", replace(TINY, tiny=False)).target_vocab_size == (
        wanted.tokenizer.vocab_size
    )


def test_kernels_of_a_profile(benchmark_module: Callable[[str], ModuleType]) -> None:
    """Two steps of three kernels; ranges with a name and what the host does are no kernels."""
    kinds = torch.autograd.DeviceType

    def event(name: str, kind: Any, us: float, is_user_annotation: bool = False) -> Any:
        span = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, device_type=kind, time_range=span, is_user_annotation=is_user_annotation)

    events = [event(name, kinds.CUDA, us) for name, us in 2 * [("gemm", 60.0), ("gemm", 20.0), ("add", 10.0)]]
    events += [event("Optimizer.step", kinds.CUDA, 500.0, True), event("aten::mm", kinds.CPU, 5.0)]
    events += 5 * [event("cudaStreamSynchronize", kinds.CPU, 1.0)]
    facts = benchmark_module("gpu_parts")._facts_of(events, 2, 360e-6)
    assert facts == {
        "ms a step, profiled": 0.18, "kernels a step": 3, "busy share": 0.5, "waits a step": 2, "us in gemm": 80,
        "us in add": 10,
    }  # fmt: skip


@dataclass
class FakeMachine:
    """A card that does not exist, on which each part takes the same time, or all that it may.

    begun: name and limit of each part.
    """

    needs: float
    now: float = 1000.0
    begun: list[tuple[str, float]] = field(default_factory=list)

    def part(self, name: str, options: Any, limit: float, output: Path) -> dict[str, Any]:
        self.begun.append((name, limit))
        self.now += min(self.needs, limit)
        return {"error": "took longer"} if self.needs > limit else {"facts": {"s": self.needs}}


@pytest.mark.parametrize("needs", [30.0, 70.0, 400.0])
def test_nine_minutes(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, needs: float) -> None:
    """Whatever the parts take, all of the first ones begin with the time that they need, and end in time."""
    card = _on(FakeMachine(needs), gpu, monkeypatch)
    output = tmp_path / "gpu.json"
    gpu._run(gpu.FIRST, gpu.Options("cuda", False, 3.0, 5), output, 540.0)
    assert card.now <= 1000 + 540
    assert [name for name, _ in card.begun] == gpu.FIRST
    assert all(gpu.LEAST_SECONDS[name] <= limit <= gpu.PART_SECONDS for name, limit in card.begun)
    before = len(card.begun)
    code = gpu._run(gpu.FIRST, gpu.Options("cuda", False, 3.0, 5), output, 60.0)
    again = [name for name, _ in card.begun[before:]]
    # What failed is tried again as far as a minute goes; what needs more than is left does not begin.
    assert (again, code) == (([], 0) if needs == 30 else (["ceilings"], 1))
    record = json.loads(output.read_text("utf-8"))
    assert record["machine"]["name"] == "NVIDIA Fake"


def _on(card: FakeMachine, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.setattr(gpu, "_in_a_process", card.part)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: card.now)
    for name, value in (
        ("get_device_name", "NVIDIA Fake"), ("device_count", 1),
        ("get_device_properties", SimpleNamespace(total_memory=1 << 37)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return card


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_part(gpu: Any, name: str) -> None:
    part = gpu.PARTS[name](TINY)
    assert part["facts"]
    assert "error" not in part, part


@pytest.fixture
def run(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Calls the script in this process. Parts run in processes of their own. Returns: the exit code."""

    def call(output: Path, *more: str) -> int:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *more, *FLAGS, "--output", str(output)])
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
