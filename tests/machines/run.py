"""Runs the tests marked `first_minute` once for each class of machine and of environment, on whatever machine this is.

    python tests/machines/run.py [CLASS ...]

Without a class all are run: of each environment only the part of the tests that it can change. A class that is named
gets all tests. The first class that fails ends it, with the exit code of its tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
HIDDEN = Path(__file__).resolve().parent / "hidden"
MARK = "pytest.mark.first_minute"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


# The expressions of pytest's -k: what an environment can change.
SHORT_RUN = "environment or learns[debug] or used[debug]"
IN_PROCESSES = "environment or processes"


@dataclass(frozen=True, kw_only=True)
class MachineClass:
    """One class of machine or environment.

    environment: variables that imitate it. hidden: as `hidden/sitecustomize.py` takes it. part: the tests that are run
    when no class is named, as pytest's -k takes them; "": all. unprivileged, has_comma: see `set_up`.
    """

    title: str
    environment: dict[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    part: str = ""
    unprivileged: bool = False
    has_comma: bool = False


CLASSES = {
    "avx2": MachineClass(
        title="AVX2, no AVX-512 and no bf16 instructions",
        environment={"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
    "plain": MachineClass(title="torch's code for any processor", environment={"ATEN_CPU_CAPABILITY": "default"}),
    "one-thread": MachineClass(title="one thread", environment=dict.fromkeys(THREADS, "1")),
    "no-proc": MachineClass(title="no /proc", hidden=("/proc",)),
    "not-linux": MachineClass(
        title="no os.sched_getaffinity, fcntl and resource, as on macOS and Windows",
        hidden=("os.sched_getaffinity", "fcntl", "resource"),
    ),
    "unprivileged": MachineClass(
        title="an ordinary user, umask 077, read-only HOME", part=SHORT_RUN, unprivileged=True
    ),
    "comma": MachineClass(title="a locale with decimal commas", hidden=("setlocale",), part=SHORT_RUN, has_comma=True),
    "ascii": MachineClass(
        title="LC_ALL=C, and Python does not turn it into UTF-8",
        environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        part=IN_PROCESSES,
    ),
    "clock": MachineClass(title="a clock that jumps back and forth", hidden=("clock",), part=SHORT_RUN),
    "no-exchange": MachineClass(
        title="a file system that cannot exchange two names", hidden=("renameat2",), part=SHORT_RUN
    ),
    "no-tmpdir": MachineClass(
        title="TMPDIR names a missing folder",
        environment={"TMPDIR": "/missing/folder"},
        part="environment or doctor or used[debug]",
    ),
    "narrow": MachineClass(
        title="a terminal with 3 columns",
        environment={"COLUMNS": "3", "LINES": "2"},
        part="environment or doctor or examples",
    ),
}
USERS_FOLDERS = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "HF_HOME", "TORCH_HOME")
# An ordinary user; where only root can read this checkout or its Python: root without the rights that users lack.
WITHOUT_RIGHTS = {
    "user nobody": ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    "root without capabilities": ("setpriv", "--bounding-set=-all"),
}
UMASK = ("sh", "-c", 'umask 077; exec "$@"', "sh")
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


def starts(*command: str) -> bool:
    """Whether a command can be run here and ends with 0."""
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, cwd=TESTS.parent, capture_output=True, check=False).returncode == 0


def dropping_rights() -> tuple[tuple[str, ...], str]:
    """The start of a command without the rights of root, and in words who then runs it."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return (), "this user"
    for who, start in WITHOUT_RIGHTS.items():
        if starts(*start, *UMASK, sys.executable, "-c", "import manyheads, pytest"):
            return start, who
    return (), "root"


@contextmanager
def set_up(kind: MachineClass) -> Iterator[tuple[tuple[str, ...], dict[str, str], str]]:
    """What a class needs besides variables. Gives: the start of the command, variables, and both in words."""
    if not (kind.unprivileged or kind.has_comma):
        yield (), {}, ""
        return
    with tempfile.TemporaryDirectory(prefix="manyheads-class-") as name:
        folder = Path(name)
        if kind.has_comma:
            locale = "de_DE.UTF-8"
            options = ("--no-archive", "--inputfile=de_DE", "--charmap=UTF-8", str(folder / locale))
            if starts("localedef", *options):
                yield (), {"LC_ALL": locale, "LOCPATH": name}, f"LC_ALL={locale}, made for this by localedef"
            elif starts("sh", "-c", "locale -a | grep -qi '^de_DE.utf-\\?8$'"):
                yield (), {"LC_ALL": locale}, f"LC_ALL={locale}"
            else:
                yield (), {"MANYHEADS_TEST_COMMA": "1"}, "imitated in Python's locale.localeconv: there is no localedef"
            return
        start, who = dropping_rights()
        folder.chmod(0o555)
        home = "/proc" if who == "root" else name  # where not even root can write
        yield (*start, *UMASK), {"HOME": home}, f"{who}, HOME={home}"
        folder.chmod(0o755)


def environment_of(kind: MachineClass, name: str, covers_proc: bool) -> tuple[dict[str, str], str]:
    """Variables of the tests, and how the class is imitated, in words."""
    environment = {**os.environ, **kind.environment, "MANYHEADS_TYPECHECK": "0", "MANYHEADS_TEST_CLASS": name}
    environment["MANYHEADS_TEST_ABSENT"] = " ".join(kind.hidden)
    environment.pop("MANYHEADS_TEST_HIDE", None)
    how = " ".join(f"{variable}={value}" for variable, value in kind.environment.items())
    if kind.unprivileged:
        environment = {key: value for key, value in environment.items() if key not in USERS_FOLDERS}
    if covers_proc:
        return environment, "an empty /proc is mounted for these processes"
    if kind.hidden:
        environment["MANYHEADS_TEST_HIDE"] = environment["MANYHEADS_TEST_ABSENT"]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HIDDEN), os.environ.get("PYTHONPATH")]))
        how = "changed in Python"
    return environment, how


def run_class(name: str, *, whole: bool) -> int:
    """Run the tests of one class. Returns: their exit code."""
    kind = CLASSES[name]
    cover = covering_proc() if kind.hidden == ("/proc",) else ()
    environment, how = environment_of(kind, name, bool(cover))
    with set_up(kind) as (start, more, more_words):
        words = ", ".join(filter(None, [how, more_words]))
        print(f"== first minute, {name}: {kind.title} ({words})", flush=True)
        command = [*cover, *start, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "first_minute"]
        if kind.part and not whole:
            command += ["-k", kind.part]
        began = time.monotonic()
        variables = {**environment, **more}
        code = subprocess.run([*command, *marked_files()], env=variables, cwd=TESTS.parent, check=False).returncode
    print(f"== first minute, {name}: {time.monotonic() - began:.0f} s", flush=True)
    return code


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in CLASSES]
    if unknown:
        print(f"there is no class {unknown[0]!r}; the classes are {', '.join(CLASSES)}.", file=sys.stderr)
        return 2
    for name in names or CLASSES:
        code = run_class(name, whole=bool(names))
        if code != 0:
            print(f"== first minute: red on the class {name}; the classes after it were not run", flush=True)
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
