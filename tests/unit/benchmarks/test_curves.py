"""`benchmarks/curves.py`: the clock of a side, whole runs of small models, resuming, the table and the picture."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from manyheads.data.translation.prepared import PreparedData, prepare_corpus
from manyheads.data.translation.preparing import PairList
from manyheads.evaluation.bleu import corpus_bleu
from manyheads.text.settings import TokenizerSettings

Import = Callable[[str], ModuleType]
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture
def side_module(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> Import:
    """A script of curve_sides/, imported as its neighbours import it."""
    monkeypatch.syspath_prepend(str(Path(benchmark_module("harness").__file__ or "").parent / "curve_sides"))
    return benchmark_module


@pytest.fixture
def curves(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("MANYHEADS_PRECISION", "fp32")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = benchmark_module("curves")
    monkeypatch.setattr(found, "look_at_machine", lambda say: {"class": "test"})
    return found


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Twenty prepared pairs, four of them held out twice."""
    rows = [(" ".join(WORDS[: 1 + place % 9]), " ".join(WORDS[place % 9 :])) for place in range(20)]
    splits = {"train": rows, "valid": rows[:4], "test": rows[4:8]}
    lists: dict[str, Any] = {name: PairList(name, some) for name, some in splits.items()}
    prepare_corpus(tmp_path / "prepared", **lists, tokenizer=TokenizerSettings(kind="word", vocab_size=32))
    return tmp_path / "prepared"


def test_the_clock_stands_still_while_a_side_looks(side_module, monkeypatch, tmp_path):
    """An update takes 25 s and a look 1,000: looks come at each third of two minutes, and the end after 5 updates."""
    looks = side_module("looks")
    now = [0.0]
    monkeypatch.setattr(looks.time, "perf_counter", lambda: now[0])

    def look(name: str) -> dict[str, str]:
        now[0] += 1000.0
        return {"hypotheses": f"{name}.ids"}

    def update(run: Any) -> int:
        now[0] += 25.0
        return 7000

    run = looks.Run(looks.Task(data=tmp_path, out=tmp_path, minutes=2, num_looks=3), look)
    run.train(update)
    assert [(one["number"], one["seconds"], one["updates"], one["tokens"]) for one in run.looks] == [
        (1, 50.0, 2, 14_000),
        (2, 100.0, 4, 28_000),
        (3, 125.0, 5, 35_000),
    ]
    assert (tmp_path / "progress.txt").read_text("utf-8") == "2.1 of 2 minutes, 5 updates, 280 tokens/s\n"
    assert run.looks[0]["hypotheses"] == "valid-1.ids"
    run.write(12, {"rate": 0.1})
    found = json.loads((tmp_path / "side.json").read_text("utf-8"))
    assert (found["seconds"], found["updates"], found["tokens_per_second"]) == (125.0, 5, 280.0)


def test_updates_end_a_run_and_count_as_progress(side_module: Import, tmp_path: Path) -> None:
    looks = side_module("looks")
    run = looks.Run(looks.Task(data=tmp_path, out=tmp_path, minutes=60, max_updates=4, num_looks=2), lambda name: {})
    run.train(lambda run: 1)
    assert [(one["number"], one["updates"]) for one in run.looks] == [(1, 2), (2, 4)]


@pytest.mark.parametrize(("count", "length", "stride"), [(100, 16, 8), (100, 16, 16), (17, 16, 8), (9, 16, 8)])
def test_windows_score_every_token_but_the_first_once(side_module, count, length, stride):
    scored = []
    for first, size, known in side_module("text_side").windows(count, length, stride):
        assert 0 < size <= length
        assert first == 0 or known >= min(stride, length - stride)
        scored += range(first + 1 + known, first + 1 + size)
    assert scored == list(range(1, count))


def test_a_peer_reads_the_whole_held_out_text(side_module: Import, tmp_path: Path) -> None:
    """The nats of windows together are those of each window by itself."""
    pytest.importorskip("transformers")
    looks, text_side = side_module("looks"), side_module("text_side")
    for split, size in (("train", 90), ("valid", 75), ("test", 40)):
        np.save(tmp_path / f"{split}.npy", np.random.default_rng(size).integers(0, 11, size).astype(np.uint16))
    (tmp_path / "facts.json").write_text(json.dumps({"vocab_size": 11}), encoding="utf-8")
    task = looks.Task(data=tmp_path, out=tmp_path, minutes=60, max_updates=2, num_looks=1, small=True, length=16)

    def build(vocab_size: int) -> Any:
        module = side_module("gpt2_side")
        return module.Gpt2(vocab_size, module.SMALL, 0.0)

    side = text_side.TextSide(task, build, length=16, rows=2, stride=8, warm=2)
    side.run()
    found = json.loads((tmp_path / "side.json").read_text("utf-8"))
    assert (found["updates"], found["tokens"], len(found["looks"])) == (2, 64, 1)
    assert found["test"]["own"]["scored_tokens"] == 39
    ids = torch.from_numpy(np.load(tmp_path / "test.npy").astype(np.int64))
    nats = 0.0
    with torch.no_grad():
        for first, size, known in text_side.windows(40, 16, 8):
            piece = ids[first : first + size + 1]
            log_probs = side.model.logits(side.model.hidden(piece[None, :-1]))[0].log_softmax(-1)
            nats -= float(log_probs.gather(1, piece[1:, None])[known:].sum())
    assert found["test"]["own"]["nats"] == pytest.approx(nats, rel=1e-5)


OUR_CONFIGS = """
import json, sys
from pathlib import Path
from looks import Task
from our_side import config_of

for what in ("translation", "language", "long"):
    folder = Path(sys.argv[1]) / what
    folder.mkdir()
    (folder / "facts.json").write_text(json.dumps({"what": what, "prepared": f"{folder}/prepared"}))
    shape = {"length": 64, "lanes": 2} if what == "long" else {}
    config = config_of(Task(data=folder, out=folder, minutes=7, small=True, **shape))
    assert (config.data.path, config.model.d_model) == (f"{folder}/prepared", 32)
    assert config.training.max_minutes == 7
    if what == "long":
        assert (config.model.max_len, config.data.segment_len, config.data.lanes) == (64, 64, 2)
        exact = config_of(Task(data=folder, out=folder, minutes=7, small=True, **shape, exact=True))
        assert (exact.model.architecture, exact.model.d_model, exact.data) == ("decoder", 32, config.data)
"""


@pytest.mark.one_in(3, "benchmarks in processes")
def test_our_side_has_the_preset_of_each_comparison(curves: ModuleType, tmp_path: Path) -> None:
    """In a process of its own, because the script sets up the machine."""
    command = [sys.executable, "-c", OUR_CONFIGS, str(tmp_path)]
    subprocess.run(
        command, check=True, cwd=Path(curves.__file__ or "").parent / "curve_sides", env=curves.environment(True)
    )


def test_waiting_tells_how_far_a_side_is(curves, tmp_path, monkeypatch, capsys):
    """The line of progress.txt once, then that no update has ended; after the deadline there is no exit status."""
    monkeypatch.setattr(curves, "SAY_SECONDS", 0.05)
    (tmp_path / "progress.txt").write_text("0.2 of 5 minutes, 31 updates, 9 tokens/s\n", encoding="utf-8")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert curves.wait(process, tmp_path, time.monotonic() + 2) is None
        said = capsys.readouterr().err.splitlines()
        assert said[0] == "  0.2 of 5 minutes, 31 updates, 9 tokens/s"
        assert set(said[1:]) == {"  no update has ended (start, held-out text, or a long update)"}
        process.communicate(b"\n")
        assert curves.wait(process, tmp_path, time.monotonic() + 60) == 0
    finally:
        process.kill()


def run_of(curves: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["curves.py", *arguments])
    code: int = curves.main()
    return code


@pytest.mark.slow
def test_two_sides_of_translation_from_data_to_table(curves, pairs, tmp_path, monkeypatch, capsys):
    """Ours and torch's train two updates; JoeyNMT's environment cannot be made; the second command runs nothing."""

    def refuse(work: Path) -> str:
        raise curves.SideError("pip install joeynmt failed: no network")

    monkeypatch.setattr(curves, "joeynmt_python", refuse)
    command = ("translation", "--minutes", "5", "--max-updates", "2", "--looks", "2", "--rounds", "1", "--small")
    command = (*command, "--data", str(pairs), "--work", str(tmp_path), "--json", str(tmp_path / "told.json"))
    assert run_of(curves, monkeypatch, *command) == 0
    said = capsys.readouterr().out
    assert "Left out: JoeyNMT 2.3. Reason: pip install joeynmt failed: no network" in said
    results = json.loads((tmp_path / "told.json").read_text("utf-8"))
    assert results["left_out"] == {"joeynmt": "pip install joeynmt failed: no network"}
    assert [(run["side"], run["round"], run["updates"]) for run in results["runs"]] == [("ours", 1, 2), ("torch", 1, 2)]
    assert str(tmp_path) not in json.dumps(results)
    folder = tmp_path / "translation-5-minutes-2-updates-small"
    data = PreparedData.open(pairs)
    for run in results["runs"]:
        assert [look["updates"] for look in run["looks"]] == [1, 2]
        assert run["precision"] == "fp32"
        found = folder / f"{run['side']}-1" / run["test"]["greedy"]["hypotheses"]
        lines = found.read_text("utf-8").split("\n")[:-1]
        if found.suffix == ".ids":
            lines = data.tokenizer.decode_batch([[int(one) for one in line.split()] for line in lines])
        bleu = corpus_bleu(lines, [target for _, target in data.test_text])
        assert run["test"]["greedy"]["quality"] == bleu.value

    monkeypatch.setattr(curves, "run_side", lambda *_, **__: pytest.fail("a finished side ran again"))
    monkeypatch.setattr(curves, "SIDES", {**curves.SIDES, "translation": ("ours", "torch")})
    assert run_of(curves, monkeypatch, *command) == 0
    again = capsys.readouterr().out
    assert again.strip() == "\n".join(line for line in said.split("\n") if "JoeyNMT" not in line).strip()
    assert run_of(curves, monkeypatch, *(*command, "--sentences", "3")) == 2
    assert "was begun with other data, or other --looks or --sentences" in capsys.readouterr().err


def plan_of(curves: ModuleType, what: str, work: Path) -> Any:
    options = {"minutes": 1.0, "rounds": 2, "looks": 1, "max_updates": 0, "small": False, "speed_seconds": 30.0}
    return curves.Plan(what=what, sides=curves.SIDES[what], work=work, **options)


def test_speed_is_measured_in_both_precisions_with_the_same_sizes(curves, tmp_path, monkeypatch):
    tasks, popen = [], subprocess.Popen

    def start(command: list[str], **_: Any) -> Any:
        task = json.loads(command[2])
        tasks.append({name: task[name] for name in ("precision", "sized_for", "minutes", "num_looks", "length")})
        rate = {"fp32": 100.0, "bf16": 200.0}[task["precision"]]
        Path(task["out"], "side.json").write_text(json.dumps({"tokens_per_second": rate}), encoding="utf-8")
        return popen([sys.executable, "-c", ""])

    monkeypatch.setattr(curves.subprocess, "Popen", start)
    assert curves.speeds(plan_of(curves, "long", tmp_path), "exact") == {"fp32": 100.0, "bf16": 200.0}
    common = {"sized_for": "bf16", "minutes": 0.5, "num_looks": 0, "length": 16384}
    assert tasks == [{"precision": "fp32", **common}, {"precision": "bf16", **common}]


def test_orders_of_rounds(curves: ModuleType, tmp_path: Path) -> None:
    plan = plan_of(curves, "long", tmp_path)
    assert plan.order(1) == ["ours", "short", "exact"]
    assert plan.order(2) == ["exact", "short", "ours"]
    shapes = [plan.shape(side, "bf16") for side in plan.sides]
    whole = {"length": 16384, "lanes": 1}
    assert shapes == [whole, {"length": 2048, "lanes": 8}, {**whole, "exact": True}]


def looks_of(*qualities: float) -> list[dict[str, float]]:
    return [{"number": place, "seconds": 60.0 * place, "quality": one} for place, one in enumerate(qualities, 1)]


def test_minutes_to_a_quality(benchmark_module: Import) -> None:
    minutes_to = benchmark_module("curves_report").minutes_to
    assert minutes_to(looks_of(10, 20, 30), 25, rising=True) == (2.5, False)
    assert minutes_to(looks_of(3, 2, 1.5), 2.25, rising=False) == (1.75, False)
    assert minutes_to(looks_of(10, 20, 30), 9, rising=True) == (1.0, True)
    assert minutes_to(looks_of(10, 20, 30), 31, rising=True) is None
    assert minutes_to(looks_of(10, 20, 15, 30), 20, rising=True) == (2.0, False)


@pytest.fixture
def results() -> dict[str, Any]:
    def run(side: str, number: int, *qualities: float) -> dict[str, Any]:
        counts = {"updates": 600, "tokens": 2_500_000, "tokens_per_second": 4200.0, "parameters": 7_000_000}
        test = {"own": {"quality": qualities[-1] + 0.1}}
        looks = looks_of(*qualities)
        return {
            "side": side,
            "round": number,
            "precision": "bf16",
            "peak_bytes": 1 << 30,
            "looks": looks,
            "test": test,
        } | counts

    machine = {"cores": 2, "cpu": "a CPU", "class": "avx512", "torch": "2.13", "commit": "abc", "date": "2026-11-25"}
    runs = [
        run("ours", 1, 3, 2, 1.5),
        run("gpt2", 1, 3.5, 3, 2.5),
        run("gpt2", 2, 3.5, 3, 2.5),
        run("ours", 2, 3, 2.6, 2.6),
    ]
    speeds = {"gpt2": {"fp32": 3000.0, "bf16": 2500.0}}
    head = {"what": "language", "minutes": 3.0, "looks": 3, "machine": machine, "precision": "bf16"}
    return {**head, "speeds": speeds, "left_out": {}, "runs": runs}


def test_report(benchmark_module: Import, results: dict[str, Any]) -> None:
    lines = benchmark_module("curves_report").report(results)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    ours = ["manyheads", "ours first", "bf16", "7,000,000", "600", "2.50", "4,200", "1,024", "1.500", "1.600"]
    assert cells[2] == ours
    assert ["GPT-2 (transformers)", "peers first", "3.500", "3.000", "2.500"] in cells
    assert ["GPT-2 (transformers)", "ours first", "2.500", "1.5"] in cells  # between 3 bits at 1 and 2 at 2 minutes
    assert ["GPT-2 (transformers)", "peers first", "2.500", "not within 3"] in cells
    assert "GPT-2 (transformers): fp32 3,000, bf16 2,500 tokens/s; fp32 is the faster. Trained in bf16." in lines
    assert "Better is lower." in lines[0]


def test_picture(benchmark_module: Import, results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    benchmark_module("curves_report").draw(results, path)
    with Image.open(path) as picture:
        assert picture.size == (1080, 600)
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 16) or []}
    assert {(31, 119, 180), (255, 127, 14)} <= colours  # a line each
