"""A run that is killed at random moments ends with the same bytes as one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyheads.checkpoint.retain import list_checkpoints
from manyheads.checkpoint.verify import verify_folder

KILLS = 10
LONG_KILLS = 100
PATIENCE_SECONDS = 60


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

    def start(self, run_dir: Path) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{run_dir}\n")
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
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    worker.start(run)
    assert worker.wait() == 0
    lines = (run / "timing.jsonl").read_text(encoding="utf-8").split("\n")
    return run, float(lines[-2].split('"elapsed_seconds": ')[1].split(",")[0])


def compared(run: Path) -> dict[str, bytes]:
    """Every file that must not depend on interruptions."""
    names = [run / "metrics.jsonl", *(run / "model").iterdir(), *(run / "samples").iterdir()]
    names += (run / "checkpoints" / "step-00000060").glob("*.safetensors")
    names += [run / "checkpoints" / "latest", run / "checkpoints" / "best"]
    return {str(path.relative_to(run)): path.read_bytes() for path in names}


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


def disturb(worker: Worker, run: Path, seconds: float, kills: int, rng: random.Random) -> tuple[int, int]:
    """Kill and resume until the run is done or `kills` are used up. Returns: kills, and those that cut a save."""
    killed = cut = 0
    while killed < kills:
        log = run / "train.log"
        before = log.stat().st_size if log.exists() else 0
        pid = worker.start(run)
        if killed % 2:
            wait_for_save(pid, run)
            time.sleep(rng.uniform(0, 0.02))
        else:
            wait_for_loop(pid, run, before)
            time.sleep(rng.uniform(0, 0.25 * seconds))
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
        if worker.wait() == 0:
            return killed, cut
        killed += 1
        checkpoints = run / "checkpoints"
        cut += checkpoints.exists() and any(".tmp-" in path.name for path in checkpoints.iterdir())
        for path in list_checkpoints(checkpoints):
            verify_folder(path)
    worker.start(run)
    assert worker.wait() == 0
    return killed, cut


def check(worker: Worker, undisturbed: tuple[Path, float], tmp_path: Path, kills: int, seed: int) -> None:
    expected, seconds = undisturbed
    wanted = compared(expected)
    assert {"checkpoints/step-00000060/model.safetensors", "checkpoints/step-00000060/ema.safetensors"} < wanted.keys()
    rng = random.Random(seed)
    killed = cut = runs = 0
    while killed < kills:
        run = tmp_path / f"run-{runs}"
        more, more_cut = disturb(worker, run, seconds, min(kills - killed, 12), rng)
        killed, cut, runs = killed + more, cut + more_cut, runs + 1
        found = compared(run)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if found[name] != wanted[name]] == []
        assert not list((run / "checkpoints").glob("*.tmp-*"))
    print(f"{killed} kills, {cut} of them within a save, in {runs} runs")
    assert cut >= kills // 10


@pytest.mark.skipif(sys.platform != "linux", reason="watches processes through /proc")
def test_ten_kills_leave_no_trace(worker: Worker, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    check(worker, undisturbed, tmp_path, KILLS, seed=random.randrange(2**32))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="watches processes through /proc")
def test_a_hundred_kills_leave_no_trace(worker: Worker, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    check(worker, undisturbed, tmp_path, LONG_KILLS, seed=random.randrange(2**32))


@pytest.mark.skipif(sys.platform != "linux", reason="watches processes through /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_in_a_complete_checkpoint_and_leave_no_trace(
    worker: Worker, undisturbed: tuple[Path, float], tmp_path: Path, number: signal.Signals
) -> None:
    expected, seconds = undisturbed
    run = tmp_path / "run"
    rng = random.Random()
    stopped = 0
    for _ in range(12):
        log = run / "train.log"
        before = log.stat().st_size if log.exists() else 0
        pid = worker.start(run)
        wait_for_loop(pid, run, before)
        time.sleep(rng.uniform(0, 0.2 * seconds))
        if is_alive(pid):
            os.kill(pid, number)
        asked = time.monotonic()
        status = worker.wait()
        assert time.monotonic() - asked < 10
        if status == 0:
            break
        assert status == 128 + number
        stopped += 1
        newest = list_checkpoints(run / "checkpoints")
        for path in newest:
            verify_folder(path)
    else:
        worker.start(run)
        assert worker.wait() == 0
    assert stopped >= 2
    assert compared(run) == compared(expected)
