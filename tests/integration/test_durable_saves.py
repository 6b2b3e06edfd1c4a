"""A reader in another process never sees a half; and the system calls, as strace sees them, come in the right order."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from file_operations import HAS_PROC, Operation
from write_order import check_metrics, check_order, commits

from manyheads.checkpoint.format import (
    apply_retention,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    write_pointer,
)
from manyheads.files.commit import write_folder
from manyheads.files.verify import verify_folder

FAST_SAVES, LONG_SAVES = 40, 1000
CALLS = "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,ftruncate"


def read_while_saving(place: Path, saves: int) -> dict[str, Any]:
    """What the reader saw during so many saves, overwrites, retentions, pointers and models."""
    (place / "checkpoints").mkdir(parents=True)
    reader = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("reader_worker.py")), str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for number in range(saves):
        step = number - number % 3  # every third is new, the others replace it
        tensors = {"model": {"w": torch.full((2000,), float(number))}, "optimiser": {"m": torch.zeros(3000)}}
        path = save_checkpoint(place / "checkpoints", step, tensors, {"number": number})
        write_pointer(place / "checkpoints", "latest", path)
        if number % 7 == 0:
            write_pointer(place / "checkpoints", "best", path)
        apply_retention(place / "checkpoints", 2)

        def fill(folder: Path, number: int = number) -> None:
            for name in ("model.safetensors", "config.json"):
                (folder / name).write_bytes(bytes([number % 256]) * 5000)

        write_folder(place / "model", fill)
    told, _ = reader.communicate(timeout=300)
    newest = list_checkpoints(place / "checkpoints")[-1]
    verify_folder(newest)
    assert load_checkpoint(newest).scalars == {"number": saves - 1}
    seen: dict[str, Any] = json.loads(told)
    assert seen["failures"] == []
    return seen


def test_a_reader_sees_whole_folders_only(tmp_path: Path) -> None:
    read_while_saving(tmp_path / "run", FAST_SAVES)


@pytest.mark.slow
def test_a_reader_sees_whole_folders_only_for_long(tmp_path: Path, figure: Callable[..., None]) -> None:
    saves, passed = 0, {"checkpoints": 0, "model": 0, "pointers": 0}
    while saves < LONG_SAVES or min(passed.values()) < LONG_SAVES:  # a slow reader must have read enough
        seen = read_while_saving(tmp_path / f"run-{saves}", LONG_SAVES)
        saves += LONG_SAVES
        passed = {kind: count + seen["passed"][kind] for kind, count in passed.items()}
    figure("R2", "another process verifies every folder under a final name during saves", saves=saves, failures=0,
           verified=passed)  # fmt: skip


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[list[Any]]]:
    """A short run under strace: its folder, strace's lines, and what the tests' own layer saw."""
    strace = shutil.which("strace")
    if strace is None or not HAS_PROC:
        pytest.skip("strace is not installed")
    place = tmp_path_factory.mktemp("traced")
    root = place / "disk"
    root.mkdir()
    worker = [sys.executable, str(Path(__file__).with_name("traced_worker.py")), str(root)]
    command = [strace, "-f", "-y", "-e", f"trace={CALLS}", "-s", "0", "-o", str(place / "trace"), *worker]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    if "ptrace" in done.stderr and not (place / "seen.json").exists():
        pytest.skip(f"strace may not trace here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return root, joined((place / "trace").read_text(encoding="utf-8")), json.loads((place / "seen.json").read_text())


def joined(text: str) -> list[str]:
    """strace's lines; calls that another thread's calls interrupt are put together again."""
    lines, open_calls = [], {}
    for line in text.split("\n"):
        process, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            open_calls[process] = rest.removesuffix("<unfinished ...>").rstrip()
        elif match := re.match(r"<\.\.\. \w+ resumed>\s*", rest):
            lines.append(open_calls.pop(process) + rest[match.end() :])
        else:
            lines.append(rest)
    return lines


class Trace:
    """strace's lines as operations below `root`, which is also the traced program's working folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.operations: list[Operation] = []
        self._files: set[Path] = set()

    def read(self, line: str) -> None:
        match = re.match(r"(\w+)\((.*)\)\s+= (\d+)", line)  # calls that failed changed nothing
        if not match:
            return
        call, arguments, result = match[1], match[2], int(match[3])
        paths = self._paths(arguments)
        if not paths or not paths[0].is_relative_to(self.root):
            return
        path, target = paths[0], paths[1] if len(paths) > 1 else None
        fresh = "O_TRUNC" in arguments or "O_EXCL" in arguments  # the latter opens nothing that is there
        if call == "openat" and (fresh or ("O_CREAT" in arguments and path not in self._files)):
            self._add("create", path)
            self._files.add(path)
        elif call in ("write", "pwrite64"):
            self._add("write", path, size=result)
        elif call in ("fsync", "fdatasync"):
            self._add("fsync", path)
        elif call.startswith("rename"):
            self._add("swap" if "RENAME_EXCHANGE" in arguments else "rename", path, target)
        elif call in ("mkdir", "mkdirat"):
            self._add("mkdir", path)
        elif call == "rmdir" or "AT_REMOVEDIR" in arguments:
            self._add("rmdir", path)
        elif call in ("unlink", "unlinkat"):
            self._add("unlink", path)
            self._files.discard(path)
        elif call == "ftruncate":
            self._add("truncate", path)

    def _add(self, kind: str, path: Path, target: Path | None = None, size: int = 0) -> None:
        self.operations.append(Operation(kind, path, target, data=bytes(size)))

    def _paths(self, arguments: str) -> list[Path]:
        """The paths among the arguments: of a handle alone, or names, each below the folder handle before it."""
        found = []
        for part in re.finditer(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>)?(?:, )?(?:"((?:[^"\\]|\\.)*)"(?!\.\.\.))?', arguments):
            handle, name = part[1], part[2]
            if name:
                found.append(Path(os.path.normpath(Path(handle or self.root) / name)))
            elif handle:
                found.append(Path(handle))
        return found


@pytest.mark.slow
def test_strace_sees_what_the_layer_sees(traced: tuple[Path, list[str], list[list[Any]]]) -> None:
    """So nothing is written past the layer on which the replay and the injected errors rest."""
    root, lines, seen = traced
    trace = Trace(root)
    for line in lines:
        trace.read(line)
    found = [
        [each.kind, str(each.path), str(each.target or ""), len(each.data) if each.kind == "write" else 0]
        for each in trace.operations
    ]
    for number, (here, there) in enumerate(zip(found, seen, strict=False)):
        assert here == there, f"operation {number}: strace saw {here}, the layer {there}"
    assert len(found) == len(seen)


def test_system_calls_come_in_the_right_order(traced: tuple[Path, list[str], list[list[Any]]]) -> None:
    root, lines, _ = traced
    trace = Trace(root)
    for line in lines:
        trace.read(line)
    found = commits(trace.operations)
    names = {target.name for number in found if (target := trace.operations[number].target) is not None}
    assert names >= {"step-00000006", "model", "latest", "best", "config.yaml"}
    for number in found:
        check_order(trace.operations, number)
        check_metrics(trace.operations, number)
