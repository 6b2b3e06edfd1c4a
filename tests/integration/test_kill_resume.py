"""A run that is killed at random moments ends with the same bytes as one that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import outcome

from manyheads.checkpoint.format import list_checkpoints, step_of
from manyheads.files.verify import verify_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches processes through /proc")
KILLS = 3
MOST_STOPS = 1  # by signals, of one run
LONG_KILLS = 100
TEXT_KILLS, LONG_TEXT_KILLS = 2, 50
SAVE_EVERY = 5  # in kill_worker.py
OPENING = 40  # operations of a start that opens data which was prepared before
PATIENCE_SECONDS = 400


class Worker:
    """kill_worker.py, one run at a time."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("kill_worker.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def _read(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def start(self, run_dir: Path, kill_before: int | None = None) -> int:
        """kill_before: the number of the operation on disk before which the child is to kill itself."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{run_dir}\n" if kill_before is None else f"{run_dir}\t{kill_before}\n")
        self.process.stdin.flush()
        return self._read()

    def wait(self) -> int:
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def undisturbed(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that nothing happened to, and how long its loop took."""
    return _undisturbed(worker, tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(scope="module")
def undisturbed_text(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The same of a language model."""
    return _undisturbed(worker, tmp_path_factory.mktemp("undisturbed") / "text")


@pytest.fixture(scope="module")
def undisturbed_reformer(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The same of a Reformer, whose hashes are others at every step."""
    return _undisturbed(worker, tmp_path_factory.mktemp("undisturbed") / "reformer")


def _undisturbed(worker: Worker, run: Path) -> tuple[Path, float]:
    worker.start(run)
    assert worker.wait() == 0
    lines = (run / "timing.jsonl").read_text(encoding="utf-8").split("\n")
    return run, float(lines[-2].split('"elapsed_seconds": ')[1].split(",")[0])


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")


def wait_for_loop(pid: int, run: Path, size: int) -> None:
    """Until train.log has grown: the loop is about to begin."""
    log = run / "train.log"
    while is_alive(pid) and not (log.exists() and log.stat().st_size > size):
        time.sleep(0.002)


def wait_for_save(pid: int, run: Path) -> None:
    """Until a temporary folder shows up in the folder of checkpoints."""
    checkpoints = run / "checkpoints"
    while is_alive(pid):
        if checkpoints.exists() and any(f".tmp-{pid}" in name for name in os.listdir(checkpoints)):  # noqa: PTH208
            return
        time.sleep(0.0002)


@dataclass
class Kills:
    """done: kills. within_saves: of them. most_lost: steps that one kill cost at most. before: phase -> kills there."""

    done: int = 0
    within_saves: int = 0
    runs: int = 0
    most_lost: int = 0
    before: Counter[str] = field(default_factory=Counter)

    def note(self, run: Path) -> None:
        """After a kill: all checkpoints must be whole, and no more than one save interval of steps lost."""
        self.done += 1
        checkpoints = run / "checkpoints"
        self.within_saves += checkpoints.exists() and any(".tmp-" in path.name for path in checkpoints.iterdir())
        for path in list_checkpoints(checkpoints):
            verify_folder(path)
        newest = max((step_of(path) or 0 for path in list_checkpoints(checkpoints)), default=0)
        note = run.with_name(f"{run.name}.step")
        reached = int(note.read_text(encoding="utf-8") or 0) if note.exists() else 0
        self.most_lost = max(self.most_lost, reached - newest)
        # A thread may still write the last checkpoint when the next one is due.
        most = 2 * SAVE_EVERY if run.name.startswith("beside") else SAVE_EVERY
        assert reached - newest <= most, f"step {reached} was done, the newest checkpoint is of step {newest}"


def disturb(worker: Worker, run: Path, seconds: float, most: int, rng: random.Random, kills: Kills) -> None:
    """Kill and resume until the run is done or `most` kills are used up; then let it end."""
    for number in range(most):
        log = run / "train.log"
        before = log.stat().st_size if log.exists() else 0
        pid = worker.start(run)
        if number % 2:
            wait_for_save(pid, run)
            time.sleep(rng.choice((0, rng.uniform(0, 0.02))))  # a save is over in a few milliseconds on a fast disk
        else:
            wait_for_loop(pid, run, before)
            time.sleep(rng.uniform(0, 0.25 * seconds))
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
        if worker.wait() == 0:
            return
        kills.note(run)
    worker.start(run)
    assert worker.wait() == 0


def disturb_at_operations(worker: Worker, run: Path, most: int, rng: random.Random, kills: Kills) -> None:
    """The same, killed right before an operation on disk: while data is prepared, at start-up, and in the loop."""
    for number in range(most):
        first = 0 if number == 0 or rng.random() < 0.2 else OPENING
        worker.start(run, first + int(rng.choice((60, 400, 800)) * rng.random()))
        if worker.wait() == 0:
            return
        kills.before[phase(run.with_name(f"{run.name}.last").read_text(encoding="utf-8"))] += 1
        kills.note(run)
    worker.start(run)
    assert worker.wait() == 0


def phase(last: str) -> str:
    """What an operation such as `unlink checkpoints/step-00000005.tmp-77/scalars.json` belongs to."""
    kind, _, path = last.partition(" ")
    place = path.split("/")[0]
    if place == "data":
        return "preparing or opening data"
    if place == "checkpoints" and (kind in ("unlink", "rmdir")):
        return "retention and clearing up"
    known = {"checkpoints": "checkpoints and pointers", "samples": "validation", "model": "the best model"}
    known |= {"metrics.jsonl": "metrics", "timing.jsonl": "metrics", "train.log": "log"}
    return known.get(place.split(".tmp-")[0], "start-up")


def check(undisturbed: tuple[Path, float], run: Path) -> None:
    """The run ended with the bytes of one that nothing happened to."""
    wanted, found = outcome(undisturbed[0]), outcome(run)
    name = "checkpoints/step-00000060/ema.safetensors"
    assert name in wanted
    assert found.keys() == wanted.keys()
    own, other = (str(path).encode() for path in (run, undisturbed[0]))
    assert [name for name in wanted if found[name].replace(own, other) != wanted[name]] == []
    assert not list(run.rglob("*.tmp-*"))


def kill_at_random(
    worker: Worker, undisturbed: tuple[Path, float], place: Path, number: int, name: str = "run"
) -> Kills:
    """So many kills, and more until a tenth of them fell into a save: how many do is up to disk and scheduler."""
    rng, kills, within = random.Random(), Kills(), number // 10
    while kills.done < number or kills.within_saves < within:
        assert kills.done < 5 * number, f"of {kills.done} kills {kills.within_saves} fell into a save, not {within}"
        run = place / f"{name}-{kills.runs}"
        most = number - kills.done if kills.done < number else 4
        disturb(worker, run, undisturbed[1], min(most, 12), rng, kills)
        check(undisturbed, run)
        kills.runs += 1
    return kills


def kill_at_operations(
    worker: Worker, undisturbed: tuple[Path, float], place: Path, number: int, name: str = "run"
) -> Kills:
    rng, kills = random.Random(), Kills()
    while kills.done < number:
        run = place / f"{name}-{kills.runs}"
        disturb_at_operations(worker, run, min(number - kills.done, 8), rng, kills)
        check(undisturbed, run)
        kills.runs += 1
    return kills


@pytest.mark.slow
def test_some_kills_leave_no_trace(worker: Worker, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    kill_at_random(worker, undisturbed, tmp_path, KILLS)


def test_kills_before_operations_leave_no_trace(worker, undisturbed, tmp_path):
    """What a kill leaves on the disk is what was there before the next operation, so no other moments are needed."""
    kill_at_operations(worker, undisturbed, tmp_path, KILLS)


def test_kills_while_a_thread_writes_checkpoints_leave_no_trace(worker, undisturbed, tmp_path):
    """The other run's checkpoints were written between steps; the bytes are the same."""
    kill_at_operations(worker, undisturbed, tmp_path, KILLS, "beside")
    kill_at_random(worker, undisturbed, tmp_path, KILLS, "beside-too")


@pytest.mark.slow
def test_kills_leave_no_trace_in_a_language_model(worker, undisturbed_text, tmp_path):
    """Memories and the places of lanes are part of what goes on."""
    assert "checkpoints/step-00000060/memory.safetensors" in outcome(undisturbed_text[0])
    kill_at_random(worker, undisturbed_text, tmp_path, TEXT_KILLS, "text")


@pytest.mark.slow
def test_kills_leave_no_trace_in_a_reformer(worker, undisturbed_reformer, tmp_path):
    """Seeds of hashes are part of what goes on."""
    memory = load_file(undisturbed_reformer[0] / "checkpoints" / "step-00000060" / "memory.safetensors")
    assert memory["0.0"].dtype == torch.int64
    assert memory["0.0"] != memory["1.0"]
    kill_at_random(worker, undisturbed_reformer, tmp_path, TEXT_KILLS, "reformer")


MANY_KILLS = {
    "run": ("undisturbed", LONG_KILLS, "SIGKILL at random moments, every second one aimed at a save"),
    "text": (
        *("undisturbed_text", LONG_TEXT_KILLS),
        "SIGKILL of a Transformer-XL's run in mid-epoch, memories and lanes compared",
    ),
    "reformer": (
        *("undisturbed_reformer", LONG_TEXT_KILLS),
        "SIGKILL of a Reformer's run in mid-epoch, hash seeds compared",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", MANY_KILLS)
def test_many_kills_leave_no_trace(worker, request, tmp_path, figure, kind, part):
    whole, number, name = MANY_KILLS[kind]
    kills = kill_at_random(worker, request.getfixturevalue(whole), tmp_path, number, kind)
    figure(
        "R1",
        f"{name}, part {part}",
        kills=kills.done,
        within_saves=kills.within_saves,
        runs=kills.runs,
        most_steps_lost_by_a_kill=kills.most_lost,
        save_every=SAVE_EVERY,
        unequal_bytes=0,
    )


@pytest.mark.slow
def test_a_hundred_kills_before_operations_leave_no_trace(worker, undisturbed, tmp_path, figure):
    kills = kill_at_operations(worker, undisturbed, tmp_path, LONG_KILLS)
    assert len(kills.before) >= 5
    figure(
        "R1",
        "SIGKILL right before an operation on disk, in any phase of a run",
        kills=kills.done,
        runs=kills.runs,
        before=dict(kills.before),
        most_steps_lost_by_a_kill=kills.most_lost,
        unequal_bytes=0,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals_end_in_a_complete_checkpoint_and_leave_no_trace(worker, undisturbed, tmp_path, number):
    seconds = undisturbed[1]
    rng = random.Random()
    stopped = 0
    for attempt in range(5):
        run = tmp_path / f"run-{attempt}"
        stopped += _stop_and_resume(worker, run, number, 0.2 * seconds, rng)
        check(undisturbed, run)
        if stopped:
            return
    pytest.fail("no signal came before the end of a run")


def _stop_and_resume(worker: Worker, run: Path, number: signal.Signals, longest: float, rng: random.Random) -> int:
    """Signal and resume until the run is done or was stopped often; then let it end. Returns how often it was."""
    for stopped in range(MOST_STOPS):
        log = run / "train.log"
        before = log.stat().st_size if log.exists() else 0
        pid = worker.start(run)
        wait_for_loop(pid, run, before)
        time.sleep(rng.uniform(0, longest))
        if is_alive(pid):
            os.kill(pid, number)
        status = worker.wait()
        if status == 0:
            return stopped
        assert status == 128 + number
        for path in list_checkpoints(run / "checkpoints"):
            verify_folder(path)
    worker.start(run)
    assert worker.wait() == 0
    return MOST_STOPS
