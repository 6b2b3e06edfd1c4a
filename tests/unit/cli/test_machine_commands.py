"""doctor, completion, and what glibc is told."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import shtab

from manyheads.catalogue import COMMANDS
from manyheads.cli import process as machine
from manyheads.cli.commands import doctor
from manyheads.cli.commands import doctor as machine_report
from manyheads.cli.commands.completion import program_parser
from manyheads.installation import install_command

Program = Callable[..., int]


def test_doctor_finds_this_machine_ready(printed, monkeypatch):
    monkeypatch.setattr(machine_report, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(machine_report, "SECONDS_A_RATE", 0.01)
    monkeypatch.setattr(machine_report, "MATRIX", 64)
    monkeypatch.setattr(doctor, "set_up_machine", lambda: True)
    assert printed("doctor").endswith("\nready\n")
    record = json.loads(printed("doctor", "--json"))
    assert record["problems"] == []
    assert record["versions"]["torch"]
    assert record["machine"]["usable_cores"] >= 1
    assert "cpu" in record["torch"]["devices"][0]
    assert record["speed"]["cpu_fp32_gflops"] >= 0
    assert record["disk"]["writable"] is True


def test_doctor_names_what_must_be_mended(manyheads, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(machine_report, "LEAST_FREE_BYTES", 2**70)
    monkeypatch.setattr(machine_report, "LEAST_PYTHON", (4, 0))
    monkeypatch.setattr(machine_report, "NEEDED", ("no-such-package",))
    monkeypatch.setattr(machine_report, "EXTRAS", {"no-such-extra": "plot"})
    record = machine_report.examine(tmp_path)
    assert record["extras"]["no-such-extra"] == f"not installed: {install_command('plot')}"
    assert [problem.partition(" ")[0] for problem in record["problems"]] == ["no-such-package", "Python", "only"]


def test_completion_knows_every_command_and_setting() -> None:
    for shell in ("bash", "zsh", "fish"):
        text = shtab.complete(program_parser(), shell)
        for name in COMMANDS:
            assert name in text
        assert "model.num_heads" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_sound(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    file = tmp_path / "script"
    file.write_text(shtab.complete(program_parser(), shell), encoding="utf-8")
    subprocess.run([shell, "-n", str(file)], check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tra"], ["train", "translate"]),
        (["train", "--preset", "de"], ["debug", "demo"]),
        (["train", "--training.max"], ["--training.max_steps", "--training.max_minutes", "--training.max_skips"]),
        (["translate", "--rules", "m"], ["manyheads", "marian", "marian-5"]),
        (["evaluate", "--memory"], ["--memory-len"]),
        (["inspect", "sh"], ["shapes"]),
        (["completion", "b"], ["bash"]),
        (["help", "tra"], ["train", "translate"]),
        (["info", "--v"], ["--verify"]),
        (["info", "runs/"], []),
    ],
)
def test_completion_in_bash(words: list[str], expected: list[str], bash_script: Path) -> None:
    quoted = " ".join(f"'{word}'" for word in ["manyheads", *words])
    typed = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}"
    program = f"source {bash_script}; {typed}; _shtab_manyheads; echo ${{COMPREPLY[@]}}"
    folder = bash_script.parent  # without runs
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
    assert done.stderr == ""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed here")
    file = tmp_path_factory.mktemp("completion") / "manyheads.bash"
    file.write_text(shtab.complete(program_parser(), "bash"), encoding="utf-8")
    return file


def test_an_unknown_shell(manyheads: Program) -> None:
    assert manyheads("completion", "tcsh") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own settings")
def test_big_blocks_are_kept() -> None:
    """In a process of its own: a block that is freed and asked for again brings no page faults."""
    program = """
import ctypes, resource, sys
from manyheads.cli.process import set_up_machine
kept = sys.argv[1] == "keep" and set_up_machine()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def touch():
    block = libc.malloc(40 << 20)
    ctypes.memset(block, 1, 40 << 20)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): touch()
print(int(bool(kept)), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    found = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True)
        found[how] = [int(word) for word in done.stdout.split()]
    if not found["keep"][0]:
        pytest.skip("no glibc here")
    assert found["keep"][1] < 200
    assert found["leave"][1] > 20 * max(found["keep"][1], 1)


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine.os, "environ", {})
    assert machine.set_up_machine() is False
    assert machine.os.environ == {}


@pytest.mark.skipif(sys.platform != "linux", reason="changes nothing elsewhere")
def test_the_users_own_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "environ", {"GOMP_SPINCOUNT": "7"})
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())  # a system without glibc
    assert machine.set_up_machine() is False
    assert machine.os.environ["GOMP_SPINCOUNT"] == "7"


@pytest.mark.skipif(sys.platform != "linux", reason="changes nothing elsewhere")
@pytest.mark.parametrize(
    ("looks", "spins"),
    [(["1"], "10000"), (["2", "1"], "10000"), (["2", "3", "2"], "3000"), ([], "3000")],
    ids=["free", "free again", "busy", "cannot look"],
)
def test_threads_wait_shorter_in_company(monkeypatch: pytest.MonkeyPatch, looks: list[str], spins: str) -> None:
    given = iter(looks)

    def read(path: Path, encoding: str) -> str:
        assert (str(path), encoding) == ("/proc/loadavg", "ascii")
        running = next(given, None)
        if running is None:
            raise FileNotFoundError(path)
        return f"0.50 0.40 0.30 {running}/134 4711\n"

    monkeypatch.setattr(machine.Path, "read_text", read)
    monkeypatch.setattr(machine.os, "environ", {})
    machine.set_up_machine()
    assert machine.os.environ["GOMP_SPINCOUNT"] == spins
