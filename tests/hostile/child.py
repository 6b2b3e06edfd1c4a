"""Reads every artefact under the guard, in a process of its own: `python -m hostile.child FOLDER quick|full`.

Prints one JSON object: for each call, what it was, its exit code, what it printed, and what it did besides.
"""

import contextlib
import hashlib
import io
import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slices import drawn

import manyheads
import manyheads.nn.attention.scores  # no honest file below needs it, and importing it later would write a .pyc
from hostile.artefacts import ARTEFACTS, Artefact
from hostile.base import Base, Call, make_base
from hostile.guard import Guard, SideEffectError
from manyheads.cli.main import guarded, main

MOST_SECONDS = 120
SPARE_BYTES = 3 << 30


class HangError(BaseException):
    """A call took too long. Not an Exception, so that no handler in the code under test can keep it silent."""


def call(arguments: Call) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one call."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = use(arguments[1], arguments[2]) if arguments[0] == "python" else main(arguments)
        except SystemExit as left:
            code = int(left.code or 0)
    out.flush()
    return code, out.buffer.getvalue().decode("utf-8", "replace"), err.getvalue()  # type: ignore[attr-defined]


def use(function: str, argument: str) -> int:
    """What is reached from Python, reported as the program would."""

    def run() -> int:
        if function == "load":
            manyheads.load(argument)
        elif function == "from_pretrained":
            manyheads.Translator.from_pretrained(argument)
        elif function == "read_tensors":
            from manyheads.extras.peers.legacy_pickle import read_saved

            read_saved(Path(argument))
        else:
            raise ValueError(function)
        return 0

    return guarded(run)


def warm_up(base: Base, folder: Path) -> None:
    """Every kind of call once, on honest files, so that what is imported late is; and nothing honest is refused."""
    copy = folder / "warm"
    model, run, data = base.copy_model(copy), base.copy_run(copy), base.copy_data(copy)
    calls = [*base.uses_of_model(model), *base.uses_of_run(run), *base.uses_of_data(data)]
    calls += [["info", str(run)], ["info", str(model)]]
    calls += [["convert", str(base.marian), "--output", str(copy / "converted")]]
    pairs = ["--source", str(base.source), "--target", str(base.target), "--tokenizer", str(model)]
    calls += [["prepare", *pairs, "--valid-count", "0", "--output", str(copy / "prepared")]]
    for arguments in calls:
        code, out, err = call(arguments)
        if code != 0:
            raise RuntimeError(f"{arguments} on honest files ended with {code}: {out}{err}")
    shutil.rmtree(copy)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """No call may take for ever."""

    def ring(*_: Any) -> None:
        raise HangError(f"still running after {MOST_SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory() -> None:
    """What is taken now and a little more: sizes must be checked before they are allocated."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def offer(artefact: Artefact, base: Base, folder: Path, guard: Guard, full: bool) -> list[dict[str, Any]]:
    """Make an artefact and hand it to those who might read it."""
    canary = folder.parent.parent / "canary"
    folder.mkdir(parents=True)
    calls = artefact.make(base, folder, canary)
    records = []
    for arguments in calls if full else calls[:1]:
        guard.seen.clear()
        started = time.monotonic()
        try:
            with bounded(), guard.armed():
                code, out, err = call(arguments)
        except SideEffectError as effect:
            code, out, err = -1, "", f"side effect: {effect}"
        except BaseException:
            code, out, err = -2, "", traceback.format_exc()[-2000:]
        effects = list(guard.seen) + (["the canary sang"] if canary.exists() else [])
        canary.unlink(missing_ok=True)
        records.append(
            {
                "artefact": artefact.name,
                "call": [text.replace(str(folder), "ARTEFACT") for text in arguments],
                "code": code,
                "stdout": out[-500:],
                "stderr": err[-3000:],
                "effects": effects,
                "seconds": round(time.monotonic() - started, 2),
            }
        )
    shutil.rmtree(folder)
    return records


def digest(folder: Path) -> str:
    """SHA-256 over every file of a folder, names included."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(str(path).encode() + path.read_bytes())
    return total.hexdigest()


def run(folder: Path, full: bool, only: str = "") -> dict[str, Any]:
    """Every artefact, or a slice of the quick ones; `only` chooses by a part of the name."""
    work = folder / "work"
    base = make_base(work / "base", lambda arguments: call(arguments)[0])
    tempfile.tempdir = str(work)
    warm_up(base, work)
    guard = Guard(work, child="manyheads.extras.peers.legacy_pickle_child")
    limit_memory()
    before = digest(work / "base")
    records = []
    chosen = range(len(ARTEFACTS)) if full or only else drawn(len(ARTEFACTS), 10, "artefacts")
    for number, artefact in enumerate(ARTEFACTS):
        if number in chosen and only in artefact.name and (full or not artefact.slow):
            records += offer(artefact, base, work / str(number), guard, full)
    return {"records": records, "honest_files_unchanged": digest(work / "base") == before}


if __name__ == "__main__":
    result = run(Path(sys.argv[1]), sys.argv[2] == "full", *sys.argv[3:4])
    print(json.dumps(result))
