"""Runs the tests marked `first_minute` once for each class of machine, on whatever machine this is.

    python tests/machines/run.py [CLASS ...]

The first class that fails ends it, with the exit code of its tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
HIDDEN = Path(__file__).resolve().parent / "hidden"
MARK = "pytest.mark.first_minute"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class MachineClass:
    """One class of machine. environment: variables that imitate it. hidden: as `hidden/sitecustomize.py` takes it."""

    title: str
    environment: dict[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()


CLASSES = {
    "avx2": MachineClass(
        title="AVX2, no AVX-512 and no bf16 instructions",
        environment={
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
    "plain": MachineClass(title="torch's code for any processor", environment={"ATEN_CPU_CAPABILITY": "default"}),
    "one-thread": MachineClass(title="one thread", environment=dict.fromkeys(THREADS, "1")),
    "no-proc": MachineClass(title="no /proc", hidden=("/proc",)),
    "not-linux": MachineClass(
        title="no os.sched_getaffinity, fcntl and resource, as on macOS and Windows",
        hidden=("os.sched_getaffinity", "fcntl", "resource"),
    ),
}
# With root, or where users may have namespaces, /proc is covered for a process and its children, native code included.
COVER_PROC = ("sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
NAMESPACES = (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount"))


def covering_proc() -> tuple[str, ...]:
    """The start of a command whose process sees an empty /proc; nothing where this system does not allow it."""
    for namespace in NAMESPACES if shutil.which("unshare") else ():
        start = (*namespace, *COVER_PROC)
        empty = subprocess.run([*start, "test", "!", "-e", "/proc/self"], capture_output=True, check=False)
        if empty.returncode == 0:
            return start
    return ()


def marked_files() -> list[str]:
    """Those with tests of the first minute: collecting all the others would take longer than running these."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if MARK in path.read_text(encoding="utf-8")]
    return [str(path) for path in files]


def command_of(kind: MachineClass) -> tuple[list[str], dict[str, str], str]:
    """Command, environment, and how the class is imitated, in words."""
    start = covering_proc() if kind.hidden == ("/proc",) else ()
    environment = {**os.environ, **kind.environment, "MANYHEADS_TYPECHECK": "0", "MANYHEADS_TEST_ABSENT": ""}
    environment.pop("MANYHEADS_TEST_HIDE", None)
    how = " ".join(f"{name}={value}" for name, value in kind.environment.items())
    if kind.hidden:
        environment["MANYHEADS_TEST_ABSENT"] = " ".join(kind.hidden)
        how = "an empty /proc is mounted for these processes"
    if kind.hidden and not start:
        environment["MANYHEADS_TEST_HIDE"] = " ".join(kind.hidden)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HIDDEN), os.environ.get("PYTHONPATH")]))
        how = "hidden from Python"
    command = [*start, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "first_minute"]
    return [*command, *marked_files()], environment, how


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in CLASSES]
    if unknown:
        print(f"there is no class {unknown[0]!r}; the classes are {', '.join(CLASSES)}.", file=sys.stderr)
        return 2
    for name in names or CLASSES:
        command, environment, how = command_of(CLASSES[name])
        print(f"== first minute, {name}: {CLASSES[name].title} ({how})", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, env=environment, cwd=TESTS.parent, check=False).returncode
        print(f"== first minute, {name}: {time.monotonic() - began:.0f} s", flush=True)
        if code != 0:
            print(f"== first minute: red on the class {name}; the classes after it were not run", flush=True)
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
