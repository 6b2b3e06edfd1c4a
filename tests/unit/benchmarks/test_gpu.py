"""Every part of `benchmarks/gpu.py` runs, on a CPU and at the smallest sizes, and finished parts are not repeated."""

import json
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from manyheads.errors import MissingExtraError
from manyheads.nn.kernels import modes, policy
from manyheads.tasks.translation.settings import demo

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"
sys.path.append(str(SCRIPT.parent))
from gpu_sides import Options, Side, compare  # noqa: E402

FLAGS = ["--device", "cpu", "--tiny", "--without-compiler"]
TINY = Options("cpu", True, 0.0, 1, compiles=False)


@pytest.fixture
def gpu(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("gpu")


FACTS = ["correct", "profile-base", "profile-demo", "profile-xl", "tests", "tests-slow"]
FAST_FACTS = ["correct", "profile-demo", "profile-xl"]
PARTS = ["ceilings", "base", "base-real", "demo", "big", "xl", "xl-large", "generate", "decode-greedy", "decode-beam4"]
PARTS += ["attention", "reformer-16k", "reformer-64k", "reformer-256k"]
FAST = ["ceilings", "attention", "base-real", "decode-greedy", "xl", "reformer-16k"]


PACKAGES = {
    "nn.Transformer, Liger's loss",
    "disentangled-flash",
    "MarianMT",
    "x-transformers",
    "TransfoXL, TF32",
    "reformer-pytorch",
    "CTranslate2",
}


def check(part: dict[str, Any]) -> None:
    """Only a package that is not there may be missing, and its name is given."""
    errors = {name: side["error"] for name, side in part["sides"].items() if "error" in side}
    assert errors.keys() <= PACKAGES, errors
    assert all(error.startswith(("ModuleNotFound", "ImportError", "MissingExtra")) for error in errors.values()), errors
    assert all("missing" in part["sides"][name] for name in errors)
    assert all(ratio["lowest"] <= ratio["median"] <= ratio["highest"] for ratio in part["ratios"].values())


# Some parts stand for the others, which differ in sizes and peers; all of them run in the long check.
@pytest.mark.one_in(3)
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
@pytest.mark.parametrize("name", ["base-real", "xl", "reformer-16k", "decode-greedy", "decode-beam4", "generate"])
def test_compiled_sides_run(gpu: Any, name: str) -> None:
    part = gpu.PARTS[name](replace(TINY, compiles=True, limit=3600.0))
    check(part)
    compiled = {side: figures for side, figures in part["sides"].items() if "compiled" in side}
    assert compiled.keys() == set(gpu.COMPILED[name])
    assert all("step_seconds" in figures for figures in compiled.values())


def test_the_sides_that_are_compiled_first(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(makers: dict[str, Any], *_: Any) -> None:
        asked.update(makers)

    monkeypatch.setitem(gpu.PARTS["base"].__globals__, "compare", lambda *given: ask(*given) or {"sides": {}})
    for name in PARTS[1:]:
        asked: set[str] = set()
        gpu.PARTS[name](replace(TINY, compiles=True))
        assert [side for side in asked if "compiled" in side] or name in ("ceilings", "attention")
        assert {side for side in asked if "compiled" in side} == set(gpu.COMPILED.get(name, ())), name


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
    facts_of = benchmark_module("gpu_checks")._facts_of
    with pytest.raises(RuntimeError, match="the profiler saw no kernel"):
        facts_of([], 2, 360e-6, has_kernels=True)
    facts = facts_of(events, 2, 360e-6, has_kernels=True)
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
    gpu._run(gpu.FIRST, gpu.Options("cuda", False, 3.0, 5), output, 540.0, "c0ffee")
    assert card.now <= 1000 + 540
    assert [name for name, _ in card.begun] == gpu.FIRST
    assert all(gpu.LEAST_SECONDS[name] <= limit <= gpu.PART_SECONDS for name, limit in card.begun)
    before = len(card.begun)
    code = gpu._run(gpu.FIRST, gpu.Options("cuda", False, 3.0, 5), output, 60.0, "c0ffee")
    again = [name for name, _ in card.begun[before:]]
    # What failed is tried again as far as a minute goes; what needs more than is left does not begin.
    failed = [name for name, limit in card.begun[:before] if needs > limit]
    assert again == [name for name in failed if name in again]
    assert bool(again) == bool(failed) == bool(code)
    assert card.now <= 1000 + 540 + 60
    record = json.loads(output.read_text("utf-8"))
    assert record["machine"]["name"] == "NVIDIA Fake"
    assert (record["machine"]["capability"], record["machine"]["driver"]) == ([9, 0], "580.1")
    assert {"torch", "triton", "files", "packages"} <= record["machine"].keys()
    assert {part["commit"] for name, part in record["parts"].items() if name != "ceilings"} == {"c0ffee"}


def _on(card: FakeMachine, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    def compile_first(names: Any, options: Any, output: Path, end: float) -> None:
        card.now = max(card.now, min(card.now + 150, end - sum(gpu.LEAST_SECONDS[name] for name in names)))

    monkeypatch.setattr(gpu, "_in_a_process", card.part)
    monkeypatch.setattr(gpu, "_compile_first", compile_first)
    monkeypatch.setattr(gpu, "_answer", lambda program, *_: "580.1" if program == "nvidia-smi" else None)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: card.now)
    for name, value in (
        ("get_device_name", "NVIDIA Fake"), ("device_count", 1), ("get_device_capability", (9, 0)),
        ("get_device_properties", SimpleNamespace(total_memory=1 << 37)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return card


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", [name if name in FAST_FACTS else pytest.param(name, marks=pytest.mark.slow) for name in FACTS]
)
def test_facts_of_a_part(gpu: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "saves_launches", lambda device: modes.is_fast() and modes.asked.saves_launches)
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


def test_a_finished_part_is_not_repeated(run: Run, gpu: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """A part that failed is run again."""
    output = tmp_path / "gpu.json"
    assert run(output, "ceilings") == 0, capsys.readouterr().err
    record = json.loads(output.read_text("utf-8"))
    whole = record["parts"]["ceilings"]
    check(whole)
    assert record["machine"]["torch"]
    record["parts"] |= {"ddp": whole, "ceilings": {"error": "took longer than 180 seconds"}}
    output.write_text(json.dumps(record), encoding="utf-8")
    again: list[str] = []
    monkeypatch.setattr(gpu, "_in_a_process", lambda name, *_: again.append(name) or {**whole, "facts": {"a": 1}})
    run(output, "ddp", "ceilings")
    assert "ddp: already in" in capsys.readouterr().out
    after = json.loads(output.read_text("utf-8"))
    assert again == ["ceilings"]
    assert (after["parts"]["ddp"], after["parts"]["ceilings"]["facts"]) == (whole, {"a": 1})


def test_a_part_is_run_again_when_a_peer_has_come(
    run: Run, gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages that were not there are in the file; once one of them is there, so are its figures."""
    begun: list[str] = []
    part: dict[str, Any] = {"sides": {"ours": {}, "TransfoXL": {"error": "none", "missing": "TRANSFO_XL"}}}
    monkeypatch.setattr(gpu, "_in_a_process", lambda name, *_: begun.append(name) or part)
    monkeypatch.setattr(gpu, "lines_of", lambda part: [])
    monkeypatch.setattr(gpu, "table", lambda parts: [])
    monkeypatch.delenv("TRANSFO_XL", raising=False)
    output = tmp_path / "gpu.json"
    for _ in range(2):
        run(output, "xl", "ceilings")
    assert begun == ["xl", "ceilings"]
    part = {"sides": {"ours": {}}}
    monkeypatch.setenv("TRANSFO_XL", "folder")
    capsys.readouterr()
    for _ in range(2):
        run(output, "xl")
    assert begun == ["xl", "ceilings", "xl"]
    assert "xl: again, because TRANSFO_XL is there now" in capsys.readouterr().out


def test_what_a_side_lacks(benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = benchmark_module("gpu_sides").missing
    chained = MissingExtraError("CTranslate2 is not installed")
    chained.__cause__ = ModuleNotFoundError("No module named 'no_such.part'", name="no_such.part")
    assert missing(chained) == "no_such.part"
    assert missing(ImportError("cannot import name 'x' from 'torch'", name="torch")) == ""  # which is there
    assert missing(RuntimeError("out of memory")) == missing(ImportError("libcublas.so.12")) == ""
    config, batch = SimpleNamespace(), SimpleNamespace()
    monkeypatch.delenv("TRANSFO_XL", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.0"))
    with pytest.raises(ImportError, match=r"has no TransfoXL; install 4\.35\.2") as error:
        benchmark_module("gpu_peers").transfo_xl(config, batch, TINY)
    assert missing(error.value) == "TRANSFO_XL"


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


def test_what_is_wrong_is_found(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One way computes something else, another one fails; the default is right."""
    checks = sys.modules["gpu_checks"]
    right = checks.relative_attention

    def broken(*given: Any) -> Any:
        return right(*given) * (1.05 if modes.asked.saves_launches else 1.0)

    monkeypatch.setattr(checks, "relative_attention", broken)
    monkeypatch.setattr(checks, "_check_steps", lambda comparison: None)
    part = gpu.PARTS["correct"](TINY)
    assert part["error"].startswith("wrong: relative attention, fewer launches, output; ")
    assert "default" not in part["error"]
    with monkeypatch.context() as patch:
        patch.setattr(checks, "local_attention", lambda *given, **_: sum(given) * torch.nan)
        assert "local attention, default, output" in gpu.PARTS["correct"](TINY)["error"]


def test_the_lines_for_the_tables_of_policy(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = sys.modules["gpu_checks"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(checks, "triton_lack", lambda options: None)
    monkeypatch.setattr(checks, "version", lambda name: "3.7.1")
    options = Options("cuda", False, 3.0, 5)
    found = checks._lines_of_policy(options, {})
    assert literal_eval(found["for policy._PROVEN"]) == ((9, 0), torch.__version__)
    wanted = {((9, 0), torch.__version__, "3.7.1", kernel) for kernel in policy.TritonKernel.__args__}  # type: ignore[attr-defined]
    assert set(literal_eval(f"[{found['for policy._PROVEN_TRITON']}]")) == wanted
    assert list(checks._lines_of_policy(options, {"Triton": ["x"]})) == ["for policy._PROVEN"]
    assert list(checks._lines_of_policy(options, {"default": ["x"]})) == ["for policy._PROVEN_TRITON"]
    assert checks._lines_of_policy(TINY, {}) == {}


def test_a_table_of_policy_names_what_a_stored_record_has_shown() -> None:
    """A card may be in a table only if its record is in benchmarks/."""
    shown = set()
    for path in SCRIPT.parent.glob("*gpu*.json"):
        record = json.loads(path.read_text("utf-8"))
        facts = record["parts"].get("correct", {}).get("facts", {})
        shown |= {literal_eval(facts["for policy._PROVEN"])} if "for policy._PROVEN" in facts else set()
        shown |= set(literal_eval(f"[{facts.get('for policy._PROVEN_TRITON', '')}]"))
    assert shown >= policy._PROVEN
    assert shown >= policy._PROVEN_TRITON


def test_rounds_that_ended_are_kept(gpu: Any, tmp_path: Path) -> None:
    """A side that fails in a later round ends the part; what it measured before, and the reason, are kept."""
    partial, steps = tmp_path / "part.json.partial", []

    def fails_later() -> None:
        steps.append(1)
        if len(steps) > 2:
            raise ValueError("lost")

    makers = {"ours": lambda: Side("ours", lambda: None, 3, ours=True), "peer": lambda: Side("peer", fails_later, 3)}
    options = Options("cpu", True, 0.0, 4, partial=str(partial))
    with pytest.raises(ValueError, match="lost"):
        compare(makers, options)
    found = gpu._of_partial(SimpleNamespace(answer=tmp_path / "part.json"), "lost")
    assert found["error"] == "lost"
    assert found["sides"]["ours"]["step_seconds"]["rounds"] == 1
    assert found["sides"]["ours"]["of_best_peer"]["peer"] == "peer"
    assert "ours / peer" in found["ratios"]


def test_a_part_over_its_time_is_ended_and_names_its_side(gpu: Any, tmp_path: Path) -> None:
    began = gpu.time.monotonic()
    part = gpu._in_a_process("base", TINY, 2.0, tmp_path / "gpu.json")
    assert part["error"].startswith("took longer than 2 seconds")
    assert gpu.time.monotonic() - began < 30


def test_a_part_that_fails_says_why(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.sys, "executable", "/bin/sh")
    part = gpu._in_a_process("base", TINY, 20.0, tmp_path / "gpu.json")
    assert part["error"]
    assert part["trace"]
    process = SimpleNamespace(returncode=-9)
    (tmp_path / "errors").write_text("a warning\n", encoding="utf-8")
    one = gpu._Process(process, tmp_path / "part.json", tmp_path / "errors", 0.0)
    assert one.error() == "killed by SIGKILL; a warning"
    (tmp_path / "errors").write_text("torch.OutOfMemoryError: CUDA out of memory\nlater\n", encoding="utf-8")
    process.returncode = 1
    assert one.error() == "torch.OutOfMemoryError: CUDA out of memory"


def test_real_lengths_fill_their_batches(gpu: Any) -> None:
    parts = sys.modules["gpu_parts"]
    lengths = parts.real_lengths(2048)
    assert 20 < float(lengths.float().mean()) < 28
    padded, packed, buckets = parts.cut_batches(lengths, 2048)
    for kind in (padded, packed, buckets):
        assert len(torch.cat(kind).unique()) == sum(map(len, kind)) > 1500
    assert all(len(rows) * int(lengths[rows].max()) <= 2048 for rows in padded)
    assert all(int(lengths[rows].sum(0).max()) <= 2048 - 32 for rows in packed)
    sizes = {(len(rows), -(-int(lengths[rows].max()) // 16)) for rows in buckets}
    assert len(sizes) <= 4


@pytest.mark.parametrize("size", ["base", "xl"])
def test_flops_are_those_that_torch_counts(gpu: Any, size: str, by_products: None) -> None:
    """torch counts the products of a step as it runs. A Transformer-XL computes its memory's gradient for nothing;
    rows of logits are not padded here.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counted: dict[str, float] = {}
    parts = sys.modules["gpu_parts"]

    def count(makers: dict[str, Any], options: Any) -> dict[str, Any]:
        side = makers["ours, plain"]()
        side.step()
        with FlopCounterMode(display=False) as counter, modes.using_relative_path("products"):
            side.step()
        counted.update(said=side.flops, found=counter.get_total_flops())
        return {"sides": {}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "compare", count)
        patch.setattr(policy, "pads_rows_to", lambda rows, device: rows)
        gpu.PARTS[size](TINY)
    assert counted["said"] == pytest.approx(counted["found"], rel=0.05 if size == "xl" else 1e-9)


def test_an_output_that_cannot_be_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "missing" / "gpu.json", "ceilings") == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "gpu.json").write_text("{", encoding="utf-8")
    assert run(tmp_path / "gpu.json", "ceilings") == 2
    assert "holds no results of this script; give another --output" in capsys.readouterr().err


def test_the_table_is_short() -> None:
    from gpu_report import table

    spread = {"median": 0.5, "lowest": 0.5, "highest": 0.5, "rounds": 1}
    side = {"step_seconds": spread, "tokens_per_second": spread, "of_best_peer": {"peer": "a", **spread}}
    lines = table({"xl": {"sides": {"ours": side, "a": {"error": "left out"}}}, "ddp": {"skipped": "one GPU"}})
    assert lines[1].split() == ["xl", "ours", "500.00", "0", "0.50"]
    assert lines[2:] == ["xl, a: left out", "ddp: one GPU"]


@pytest.mark.slow
def test_a_part_ends_with_the_script_that_started_it(tmp_path: Path) -> None:
    """Killed while it computes; the next call runs the part again."""
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "base", "ceilings", "--output", str(output), *FLAGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ours, plain: ready" in line:
                break
        process.kill()
    # The pipe is closed when the part has ended, too.
    assert not output.exists()
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert json.loads(output.read_text("utf-8"))["parts"].keys() == {"base", "ceilings"}
