"""`prepare` of a large corpus: bounded memory, no silence, and the same bytes after a kill. Linux only."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.data.corpora.tatoeba import load_tatoeba
from manyheads.data.prepared import PreparedData

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads peaks of memory")]

FEW, MANY = 150_000, 1_000_000
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


def prepare(output: Path, options: list[str], kill_at: str = "", seconds: float = 0.0) -> tuple[float, float]:
    """Prepare, or begin and send SIGKILL some seconds after a line. Returns: the longest silence, and the peak in MiB.

    Args: kill_at: how the line begins; empty: no kill.
    """
    command = [sys.executable, "-m", "manyheads", "prepare", *options, "--output", str(output)]
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
    options = write_pairs(tmp_path, FEW)
    for moment in (("read train",), ("learn pieces",), ("encode train",), ("encode train", 2.0)):
        prepare(tmp_path / "killed", options, *moment)
        assert not (tmp_path / "killed").exists()
    prepare(tmp_path / "killed", options)
    prepare(tmp_path / "undisturbed", options)
    killed, undisturbed = (PreparedData.open(tmp_path / name) for name in ("killed", "undisturbed"))
    assert killed.digest == undisturbed.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de", "a.en", "killed", "undisturbed"]


def test_memory_is_bounded_and_no_phase_is_silent(tmp_path: Path, figure: Callable[..., None]) -> None:
    silent, peak = prepare(tmp_path / "data", write_pairs(tmp_path, MANY))
    figure("growth", "preparation", pairs=MANY, peak_mib=round(peak), longest_silence_seconds=round(silent, 1))
    assert peak < MOST_MIB
    assert silent < MOST_SILENT_SECONDS
