"""A corpus of many shards: bounded memory, and the same bytes after two kills and with any number of processes.

Its size is MANYHEADS_CORPUS_BYTES of text, 1 GB if that is not set, and MANYHEADS_CORPUS_LEVEL is `bpe` (if that is not
set) or `bytes`, which is one text without documents: then ids take one byte, and the disk holds the text twice at most.
Linux only.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from manyheads.data.corpora import load_tatoeba
from manyheads.data.language.prepared import TextData

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads peaks of memory")]

BYTES = int(os.environ.get("MANYHEADS_CORPUS_BYTES", 10**9))
LEVEL = os.environ.get("MANYHEADS_CORPUS_LEVEL", "bpe")
DOCUMENTS = "none" if LEVEL == "bytes" else "files"
MOST_MIB = 1500
SHARD_BYTES = 50_000_000
DIFFERENT_SHARDS = 24
SYLLABLES = ("ba", "ker", "stein", "mo", "li", "tan", "ru", "vel", "schn", "ho", "fri", "dor", "na", "zi", "wald")


def documents(chance: random.Random) -> Iterator[str]:
    """Texts of ten to a hundred sentences in lines, with made-up names and numbers."""
    known = [side for pair in load_tatoeba("train") for side in pair]
    lines = []
    for _ in range(20_000):
        name = "".join(chance.choices(SYLLABLES, k=3)).capitalize()
        lines.append(" ".join(chance.choices(known, k=5)) + f" {name} {chance.randrange(10**6)}.")
    while True:
        yield "\n".join([*chance.choices(lines, k=chance.randrange(2, 20)), f"{chance.randrange(10**9)}"])


def write_shards(folder: Path, num_bytes: int) -> None:
    """Write shards of the three forms, of so many bytes of text in all, in an order that does not repeat.

    Of very many some are links to one file, so that writing is quick and takes little disk.
    """
    folder.mkdir()
    chance = random.Random(1)
    texts, count = documents(chance), -(-num_bytes // SHARD_BYTES)
    different: list[Path] = []
    for number in range(count):
        most = min(SHARD_BYTES, num_bytes - number * SHARD_BYTES)
        if number >= DIFFERENT_SHARDS and most == SHARD_BYTES:
            known = chance.choice(different)
            (folder / f"part-{number:05}{''.join(known.suffixes)}").hardlink_to(known)
            continue
        form = (".jsonl.zst", ".jsonl.gz", ".parquet")[number % 3]
        path, size = folder / f"part-{number:05}{form}", 0
        different.append(path)
        rows: list[str] = []
        while size < most:
            rows.append(next(texts))
            size += len(rows[-1].encode())
        if form == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, row_group_size=4096)
        else:
            with pyarrow.output_stream(path, compression="zstd" if form.endswith("zst") else "gzip") as file:
                file.writelines(f"{json.dumps({'text': row})}\n".encode() for row in rows)


def memory_of(process: int) -> float:
    """Memory of a process and its children in MiB, mapped files included."""
    total = 0.0
    tasks = Path(f"/proc/{process}/task").glob("*/children")  # a thread may have started them
    for each in [process, *(int(number) for task in tasks for number in task.read_text().split())]:
        found = Path(f"/proc/{each}/status").read_text().partition("VmRSS:")[2].split()
        total += int(found[0]) / 1024 if found else 0
    return total


def peak_of(arguments: list[str], kill_at: str = "", seconds: float = 0.0) -> float:
    """Run a command, or send SIGKILL some seconds after a line that begins so. Returns: the peak of memory in MiB."""
    log, peak, at = Path(arguments[-1]).with_suffix(".log"), 0.0, 0.0
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "manyheads", *arguments], stdout=file, stderr=file)
        while process.poll() is None:
            with suppress(OSError):  # a process has just ended
                peak = max(peak, memory_of(process.pid))
            if kill_at and not at and any(line.startswith(kill_at) for line in log.read_text().split("\n")):
                at = time.monotonic()
            if at and time.monotonic() > at + seconds:
                process.kill()
                process.wait()
                return peak
            time.sleep(0.2)
    assert (process.returncode, kill_at) == (0, ""), log.read_text()
    log.unlink()
    return peak


def test_a_corpus_of_shards(tmp_path: Path, figure: Callable[..., None]) -> None:
    began = time.monotonic()
    write_shards(tmp_path / "shards", BYTES)
    written = time.monotonic()
    command = ["prepare", "--task", "lm", "--level", LEVEL, "--documents", DOCUMENTS, "--valid-bytes", "100000"]
    command += ["--from", str(tmp_path / "shards")]
    killed = [*command, "--processes", "3", "--output", str(tmp_path / "killed")]
    peaks = [peak_of(killed, "read train", 1.0), peak_of(killed, "encode train", 5.0)]
    assert not (tmp_path / "killed").exists()
    peaks.append(peak_of(killed))
    prepared = time.monotonic()
    one = TextData.open(tmp_path / "killed")
    digests, num_tokens = (one.manifest["files"], one.train.digest), len(one.train)
    num_files = len(list((tmp_path / "killed" / "train").glob("*.bin")))
    del one
    shutil.rmtree(tmp_path / "killed")  # so that the disk holds one of them
    again = time.monotonic()
    peaks.append(peak_of([*command, "--output", str(tmp_path / "undisturbed")]))
    ended = time.monotonic()
    other = TextData.open(tmp_path / "undisturbed", verify=False)
    assert (other.manifest["files"], other.train.digest) == digests
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in names if not name.endswith(".log")] == ["shards", "undisturbed"]
    figure(
        "growth", "a corpus of shards", bytes=BYTES, tokens=num_tokens, peak_mib=round(max(peaks)), files=num_files,
        seconds_of_writing=round(written - began), seconds_with_two_kills=round(prepared - written),
        seconds_undisturbed=round(ended - again),
    )  # fmt: skip
    assert max(peaks) < MOST_MIB
