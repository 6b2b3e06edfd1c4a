"""Long work takes no more memory at its end than after its beginning, and leaves nothing over."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tiny_run import TINY, changed

from manyheads.config.files import to_yaml
from manyheads.training.run.loop import train

STEPS = 10_000
TRANSLATION_MINUTES = float(os.environ.get("MANYHEADS_SOAK_MINUTES", "25"))
MOST_MIB_A_MINUTE = 1.0
LINE = "w1 w2 w3 w4 w5\n"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@dataclass(frozen=True)
class Sample:
    """Of a process: when, its resident MiB, open files and threads."""

    seconds: float
    mib: float
    files: int
    threads: int


def watch(process: subprocess.Popen[bytes], every: float) -> list[Sample]:
    """Sample a process until it ends."""
    samples, began = [], time.monotonic()
    place = Path(f"/proc/{process.pid}")
    while process.poll() is None:
        try:
            pages = int((place / "statm").read_text().split()[1])
            if not pages:  # it has ended, and nobody waited for it yet
                break
            counts = [len(list((place / name).iterdir())) for name in ("fd", "task")]
            samples.append(Sample(time.monotonic() - began, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, *counts))
        except (OSError, IndexError):
            break
        time.sleep(every)
    process.wait()
    return samples


def slope(samples: list[Sample]) -> float:
    """MiB a minute over the last two thirds, by least squares."""
    late = samples[len(samples) // 3 :]
    assert len(late) >= 10, "too few samples"
    return float(np.polyfit([one.seconds / 60 for one in late], [one.mib for one in late], 1)[0])


def check(samples: list[Sample], temporary: Path) -> dict[str, float]:
    """No growth. Returns: figures."""
    found = slope(samples)
    late = samples[len(samples) // 3 :]
    assert found < MOST_MIB_A_MINUTE, f"{found:.2f} MiB a minute"
    for name in ("files", "threads"):
        counts = [getattr(one, name) for one in late]
        assert max(counts[-len(counts) // 3 :]) <= max(counts[: len(counts) // 3]), name
    assert list(temporary.iterdir()) == []
    return {"mib_a_minute": round(found, 3), "minutes": round(samples[-1].seconds / 60, 1), "mib": round(late[-1].mib)}


def start(arguments: list[str], temporary: Path, **streams: int) -> subprocess.Popen[bytes]:
    temporary.mkdir()
    # torch's optimisers import its compiler, which makes the folder of its cache.
    cache = {"TORCHINDUCTOR_CACHE_DIR": f"{temporary}-of-torch"}
    environment = os.environ | cache | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    return subprocess.Popen([sys.executable, "-m", "manyheads", *arguments], env=environment, **streams)


def test_slopes() -> None:
    growing = [Sample(float(second), 100 + second / 30, 5, 2) for second in range(60)]
    assert slope(growing) == pytest.approx(2.0)
    assert slope([replace(one, mib=100.0) for one in growing]) == pytest.approx(0.0)


def test_ten_thousand_steps(tmp_path: Path, figure: Callable[..., None]) -> None:
    run = tmp_path / "run"
    often = {"max_steps": STEPS, "save_every": 500, "log_every": 50, "tensorboard": False}
    config = replace(changed(TINY, training=often, validation={"every_steps": 1000, "patience": 0}), run_dir=str(run))
    settings = tmp_path / "settings.yaml"
    settings.write_text(to_yaml(config), encoding="utf-8")
    process = start(["train", "--config", str(settings), "-q"], tmp_path / "temporary")
    samples = watch(process, 1.0)
    assert process.returncode == 0
    assert not list(run.rglob("*.tmp-*"))
    assert f'"step": {STEPS}' in (run / "metrics.jsonl").read_text(encoding="utf-8")
    figure("soak", "training", steps=STEPS, **check(samples, tmp_path / "temporary"))


def test_translation_for_long(tmp_path: Path, figure: Callable[..., None]) -> None:
    """A pipe that gives lines all the time."""
    train(replace(changed(TINY, training={"max_steps": 4}), run_dir=str(tmp_path / "run")))
    output = tmp_path / "out.txt"
    arguments = ["translate", str(tmp_path / "run"), "-", "--output", str(output), "--lines-at-once", "32"]
    process = start(arguments, tmp_path / "temporary", stdin=subprocess.PIPE)
    until, given = time.monotonic() + 60 * TRANSLATION_MINUTES, 0

    def feed() -> None:
        nonlocal given
        assert process.stdin is not None
        with process.stdin as pipe:
            while time.monotonic() < until:
                pipe.write(LINE.encode() * 64)
                given += 64

    feeder = threading.Thread(target=feed)
    feeder.start()
    samples = watch(process, 2.0)
    feeder.join()
    assert process.returncode == 0
    assert output.read_text(encoding="utf-8").count("\n") == given
    figure("soak", "translation", lines=given, **check(samples, tmp_path / "temporary"))
