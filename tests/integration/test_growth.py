"""Large corpora, scores, records and checkpoints: bounded memory, no silence, and the same bytes after a kill.

Linux only.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.data.corpora import load_tatoeba
from manyheads.data.translation.prepared import PreparedData

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads peaks of memory")]

FEW, LINES, MANY = 150_000, 200_000, 1_000_000
MOST_MIB = 900  # far less than the 1,800 MiB of a sample that is kept
MOST_SILENT_SECONDS = 20  # a line every ten seconds, with time for a busy machine
SYLLABLES = (
    "ba",
    "ker",
    "stein",
    "mo",
    "li",
    "tan",
    "ru",
    "vel",
    "schn",
    "ho",
    "fri",
    "dor",
    "na",
    "zi",
    "wald",
    "gra",
)


def write_pairs(folder: Path, count: int) -> list[str]:
    """Write pairs of one to three sentences, a made-up name and a number. Returns: the options that name the files."""
    chance, known = random.Random(1), load_tatoeba("train")
    source, target = (path.open("w", encoding="utf-8") for path in (folder / "a.en", folder / "a.de"))
    with source, target:
        for _ in range(count):
            chosen = chance.choices(known, k=chance.choice((1, 1, 2, 2, 3)))
            name = "".join(chance.choices(SYLLABLES, k=3)).capitalize()
            for file, side in ((source, 0), (target, 1)):
                file.write(" ".join(pair[side] for pair in chosen) + f" {name} {chance.randrange(10**6)}.\n")
    return ["--source", str(folder / "a.en"), "--target", str(folder / "a.de"), "--valid-count", "500"]


def measured(arguments: list[str], kill_at: str = "", seconds: float = 0.0) -> tuple[float, float]:
    """Run a command, or begin it and send SIGKILL some seconds after a line.

    Args: kill_at: how the line begins; empty: no kill.

    Returns: the longest silence in seconds, and the peak of memory in MiB.
    """
    command = [sys.executable, "-m", "manyheads", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    silent, last = 0.0, time.monotonic()
    for line in process.stderr:
        silent, last = max(silent, time.monotonic() - last), time.monotonic()
        if kill_at and line.startswith(kill_at):
            time.sleep(seconds)
            process.kill()
            break
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == (-9 if kill_at else 0)
    return max(silent, time.monotonic() - last), usage.ru_maxrss / 1024


def test_a_killed_preparation_ends_with_the_same_bytes(tmp_path: Path) -> None:
    command = ["prepare", *write_pairs(tmp_path, FEW), "--output"]
    for moment in (("read train",), ("learn pieces",), ("encode train",), ("encode train", 2.0)):
        measured([*command, str(tmp_path / "killed")], *moment)
        assert not (tmp_path / "killed").exists()
    for name in ("killed", "undisturbed"):
        measured([*command, str(tmp_path / name)])
    killed, undisturbed = (PreparedData.open(tmp_path / name) for name in ("killed", "undisturbed"))
    assert killed.digest == undisturbed.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de", "a.en", "killed", "undisturbed"]


def test_preparation(tmp_path: Path, figure: Callable[..., None]) -> None:
    silent, peak = measured(["prepare", *write_pairs(tmp_path, MANY), "--output", str(tmp_path / "data")])
    figure("growth", "preparation", pairs=MANY, peak_mib=round(peak), longest_silence_seconds=round(silent, 1))
    assert peak < MOST_MIB
    assert silent < MOST_SILENT_SECONDS


def test_scores_of_many_lines(tmp_path: Path, figure: Callable[..., None]) -> None:
    write_pairs(tmp_path, LINES)
    files = ["--hypotheses", str(tmp_path / "a.en"), "--reference", str(tmp_path / "a.de")]
    silent, peak = measured(["evaluate", *files])
    figure("growth", "scores", lines=LINES, peak_mib=round(peak), longest_silence_seconds=round(silent, 1))
    assert peak < 900  # 1,850 MiB with every statistic of every line
    assert silent < MOST_SILENT_SECONDS


CHECKPOINT = """
import sys
from pathlib import Path
import torch
from manyheads.models.pretrained import portable_state
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer.model import Transformer
from manyheads.checkpoint.format import save_checkpoint
from manyheads.training.optim.optimiser import optimiser_tensors

def memory(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) / 1024

model = Transformer(TransformerConfig(source_vocab_size=37000, target_vocab_size=37000))
optimiser = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimiser.step()
tensors = {"model": portable_state(model), "optimiser": optimiser_tensors(optimiser, dict(model.named_parameters()))}
Path("/proc/self/clear_refs").write_text("5")  # the peak is now that of the present
before = memory("VmRSS")
save_checkpoint(Path(sys.argv[1]), 1, tensors, {})
print(memory("VmHWM") - before)
"""


def test_a_checkpoint_of_the_base_model(tmp_path: Path, figure: Callable[..., None]) -> None:
    command = [sys.executable, "-c", CHECKPOINT, str(tmp_path)]
    more = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    figure("growth", "a checkpoint", mib=size >> 20, more_mib=round(more))
    assert size > 700 << 20
    assert more < 100


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one step."""
    folder = tmp_path_factory.mktemp("growth") / "run"
    options = ["--run-dir", str(folder), "--training.max_steps", "1", "--training.max_minutes", "0"]
    measured(["train", "--preset", "demo", *options])
    return folder


def test_the_records_of_a_long_run(run: Path, tmp_path: Path, figure: Callable[..., None]) -> None:
    folder = shutil.copytree(run, tmp_path / "long")
    record = {"step": 0, "epoch": 3, "tokens": 10**9, "train_loss": 1 / 3, "train_nll": 1 / 7, "learning_rate": 1e-4}
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in range(2, LINES * 10):
            more = {"valid_nll": 1 / step} if step % 10_000 == 0 else {}
            file.write(json.dumps(record | {"step": step} | more) + "\n")
    size = (folder / "metrics.jsonl").stat().st_size
    silent, peak = measured(["info", str(folder), "--json"])
    drawn, peak_drawn = measured(["info", str(folder), "--curves", str(tmp_path / "curves.png")])
    figure("growth", "records", mib=size >> 20, peak_mib=round(peak), longest_silence_seconds=round(silent, 1))
    assert size > 256 << 20
    assert max(peak, peak_drawn) < 700
    assert max(silent, drawn) < MOST_SILENT_SECONDS


def test_a_table_of_many_runs(run: Path, tmp_path: Path, figure: Callable[..., None]) -> None:
    left_out = shutil.ignore_patterns("checkpoints")
    runs = [shutil.copytree(run, tmp_path / str(number), ignore=left_out) for number in range(200)]
    began = time.monotonic()
    silent, peak = measured(["info", *map(str, runs), "--sort", "valid_nll"])
    took = time.monotonic() - began
    figure("growth", "200 runs", seconds=round(took), peak_mib=round(peak), longest_silence_seconds=round(silent, 1))
    assert silent < MOST_SILENT_SECONDS
    assert took < 120
