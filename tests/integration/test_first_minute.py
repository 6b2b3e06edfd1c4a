"""What a new user does first, on any class of machine: help, doctor, a first run of each architecture, its use.

`make first-minute` runs these once for each class (tests/machines/run.py), `make test` on the machine as it is.
"""

import errno
import importlib
import io
import json
import locale
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slices import sliced

from manyheads.cli.main import main
from manyheads.files.commit import swap
from manyheads.training.run.device import peak_memory_bytes

pytestmark = pytest.mark.first_minute

NO_PLOTS = ["--training.plots", "false"]
RUNS = {
    "debug": ["--preset", "debug"],
    "xl-debug": ["--preset", "xl-debug"],
    "reformer-debug": ["--preset", "reformer-debug", *NO_PLOTS],
    "reformer-seq2seq": ["--preset", "debug", "--architecture", "reformer-seq2seq", *NO_PLOTS],
}
each_run = pytest.mark.parametrize("name", sliced(list(RUNS), 2, "first runs"))
TRANSLATORS = ("debug", "reformer-seq2seq")
CAPABILITIES = {"avx2": "AVX2", "default": "DEFAULT"}  # what torch answers to ATEN_CPU_CAPABILITY
CLASS = os.environ.get("MANYHEADS_TEST_CLASS", "")
ABSENT = os.environ.get("MANYHEADS_TEST_ABSENT", "").split()
PROBE = """
import json, os, sys
from pathlib import Path
try:
    exec(compile("import fcntl", "probe", "exec"), {"__name__": "manyheads.probe"})
    has_fcntl = True
except ImportError:
    has_fcntl = False
proc = [Path("/proc/self").exists(), os.access("/proc/cpuinfo", os.R_OK)]
for look in (lambda: open("/proc/cpuinfo"), lambda: os.open("/proc/cpuinfo", os.O_RDONLY),
             lambda: os.readlink("/proc/self")):
    try:
        look()
        proc.append(True)
    except OSError:
        proc.append(False)
proc.append("self" in os.listdir("/proc") if os.path.exists("/proc") else False)
print(json.dumps({"/proc": proc, "fcntl": has_fcntl, "os.sched_getaffinity": hasattr(os, "sched_getaffinity")}))
"""


@pytest.fixture(autouse=True, scope="module")
def machine() -> Iterator[None]:
    """The number of threads is set by runs, for the process; the other tests of this process have their own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name of RUNS -> its run folder, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str) -> Path:
        path = folder / name
        if not path.exists():
            assert main(["train", *RUNS[name], "--run-dir", str(path)]) == 0
        return path

    return run


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A child process, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, encoding="utf-8", check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(not ABSENT, reason="a class of machine that hides something; see tests/machines/run.py")
def test_what_is_hidden_is_hidden_in_child_processes_too() -> None:
    found = json.loads(python("-c", PROBE).stdout)
    assert any(name in found for name in ABSENT) or CLASS in IMITATED
    for name in set(ABSENT) & set(found):
        assert not found[name] if isinstance(found[name], bool) else not any(found[name]), (name, found)
    for name in ABSENT:
        if name.startswith("/"):
            assert not (Path(name) / "self").exists()
        elif "." in name:
            module, _, attribute = name.rpartition(".")
            assert not hasattr(importlib.import_module(module), attribute)


def is_unprivileged() -> bool:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask == 0o077 and not _can_write(Path.home())


def _can_write(folder: Path) -> bool:
    try:
        (folder / "probe").touch()
    except OSError:
        return False
    return True


def clock_jumps() -> bool:
    times = [time.time() for _ in range(6)]
    return times != sorted(times)


def has_no_exchange() -> bool:
    with tempfile.TemporaryDirectory() as name:
        first, second = Path(name) / "first", Path(name) / "second"
        first.touch()
        second.touch()
        return not swap(first, second)


IMITATED = {
    "unprivileged": is_unprivileged,
    "comma": lambda: locale.localeconv()["decimal_point"] == ",",
    "ascii": lambda: not sys.flags.utf8_mode and locale.getencoding() == "ANSI_X3.4-1968",
    "clock": clock_jumps,
    "no-exchange": has_no_exchange,
    "no-tmpdir": lambda: not Path(os.environ["TMPDIR"]).exists(),
    "narrow": lambda: shutil.get_terminal_size().columns == 3,
}


@pytest.mark.skipif(CLASS not in IMITATED, reason="a class of environment; see tests/machines/run.py")
def test_the_environment_is_imitated() -> None:
    assert IMITATED[CLASS]()


def test_a_deleted_working_folder_is_said(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    for arguments in (["doctor"], ["train", *RUNS["debug"], "--run-dir", "run"], ["info", str(tmp_path)]):
        assert main(arguments) == 2
        assert "the working folder does not exist any more" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["--version"]) == 0
    assert main(["train", "--help"]) == 0


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_rename_that_fails_is_said_and_leaves_nothing(code, tmp_path, monkeypatch, capsys):
    def refuse(source: Any, target: Any, **_: Any) -> None:
        raise OSError(code, os.strerror(code), str(target))

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    run = tmp_path / "run"
    assert main(["train", *RUNS["debug"], "--run-dir", str(run), *NO_PLOTS]) == 2
    said = capsys.readouterr().err
    assert os.strerror(code) in said
    assert str(run) in said
    assert "Traceback" not in said
    assert [path for path in run.rglob("*") if ".tmp-" in path.name] == []


def test_the_doctor_knows_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert code == (2 if record["problems"] else 0)
    assert [text for text in record["problems"] if "are free in" not in text] == []
    assert record["machine"]["usable_cores"] >= 1
    assert record["machine"]["processor"]
    assert record["torch"]["threads"] == torch.get_num_threads()
    asked = os.environ.get("ATEN_CPU_CAPABILITY")
    if asked in CAPABILITIES and platform.machine() in ("x86_64", "AMD64"):
        assert record["torch"]["cpu_capability"] == CAPABILITIES[asked]
    if os.environ.get("OMP_NUM_THREADS") == "1":
        assert record["torch"]["threads"] == 1
    if "/proc" in ABSENT:
        assert record["machine"]["instructions"] == []


def test_peak_memory_is_known_or_said_to_be_unknown() -> None:
    assert (peak_memory_bytes(torch.device("cpu")) == 0) == ("resource" in ABSENT)


@each_run
def test_a_first_run_learns(trained: Callable[[str], Path], name: str) -> None:
    run = trained(name)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [record["train_loss"] for record in records if "train_loss" in record]
    assert len(losses) >= 3
    assert losses[-1] < losses[0]
    assert (run / "checkpoints" / "latest").exists()
    assert bool(list((run / "plots").glob("*.svg"))) == (NO_PLOTS[0] not in RUNS[name])


@each_run
def test_its_model_is_used(trained, name, monkeypatch, capsys):
    run = trained(name)
    capsys.readouterr()
    if name in TRANSLATORS:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w1 w2 w3\n\nw4 w5\n"), encoding="utf-8"))
        assert main(["translate", str(run)]) == 0
        lines = capsys.readouterr().out.split("\n")
        assert len(lines) == 4
        assert lines[1] == lines[3] == ""  # of the empty line, and behind the last
    else:
        arguments = ["generate", str(run), "He ", "--max-new-tokens", "12", "--min-new-tokens", "12", "--greedy"]
        assert main([*arguments, "--json"]) == 0
        first = capsys.readouterr().out
        (found,) = json.loads(first)["continuations"]
        assert len(found["tokens"]) == 12
        assert main([*arguments, "--json"]) == 0
        assert capsys.readouterr().out == first
    assert main(["info", str(run)]) == 0


@pytest.mark.skipif(not CLASS, reason="other tests start the program on the machine as it is")
def test_in_processes_of_their_own(tmp_path: Path) -> None:
    """As typed in a shell: what is set up before torch is imported, and the classes' variables, hold from the start."""
    run = tmp_path / "run"
    program = ["-m", "manyheads"]
    few = ["--training.max_steps", "2", "--validation.every_steps", "2", *NO_PLOTS]
    python(*program, "train", *RUNS["debug"], "--run-dir", str(run), *few, "-q", cwd=tmp_path)
    assert (run / "checkpoints" / "latest").exists()
    assert python(*program, "translate", str(run), input="w1 w2 w3\n\n", cwd=tmp_path).stdout.count("\n") == 2
