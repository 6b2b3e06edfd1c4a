"""release/set_up.py: which build of torch a machine gets, with local folders as indexes, and with servers that fail."""

import importlib.util
import os
import socket
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SPEC = "torch==2.13.0"
SCRIPT = Path(__file__).resolve().parents[2] / "release" / "set_up.py"


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, on a machine without a GPU that waits for half a second."""
    spec = importlib.util.spec_from_file_location("set_up", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "set_up", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    return module


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def add_wheel(index: Path, name: str, version: str, needs: str = "") -> None:
    """Add an empty package to a folder that pip reads as an index."""
    folder, stem = index / name, f"{name.replace('-', '_')}-{version}"
    folder.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {needs}\n" if needs else ""
    )
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{stem}-py3-none-any.whl">{stem}-py3-none-any.whl</a>')


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Name -> address: torch for CUDA and for CPUs, one without torch, one that refuses and one that hangs."""
    root = tmp_path_factory.mktemp("indexes")
    add_wheel(root / "cuda", "torch", "2.13.0", "nvidia-nothing")
    add_wheel(root / "cuda", "nvidia-nothing", "1.0")
    add_wheel(root / "cpu", "torch", "2.13.0+cpu")
    add_wheel(root / "without", "torch", "2.12.0+cpu")
    with socket.socket() as refusing, socket.socket() as hanging:
        refusing.bind(("127.0.0.1", 0))  # nobody listens
        hanging.bind(("127.0.0.1", 0))
        hanging.listen(16)  # connections are taken, and nobody answers
        yield {
            **{name: (root / name).as_uri() for name in ("cuda", "cpu", "without")},
            "refuses": f"http://127.0.0.1:{refusing.getsockname()[1]}",
            "hangs": f"http://127.0.0.1:{hanging.getsockname()[1]}",
        }


def pip_reads(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("pip_index", "cpu_index", "has_driver", "chosen", "said"),
    [
        ("cpu", "refuses", False, "", "CPU build, because no NVIDIA driver answers (torch 2.13.0+cpu, 0 MB"),
        ("cuda", "cpu", False, "cpu", "CPU build, because no NVIDIA driver answers (torch 2.13.0+cpu, 0 MB"),
        ("cuda", "refuses", False, "", "as PyPI has it (torch 2.13.0, 0 MB to download in 2 packages)"),
        ("cuda", "hangs", False, "", "no answer in 0.5 seconds"),
        ("cuda", "without", False, "", f"it has no {SPEC} for this Python"),
        ("hangs", "cpu", False, "cpu", "CPU build"),
        ("cuda", "hangs", True, "", "torch for CUDA, because an NVIDIA driver answers"),
    ],
)
def test_the_build_fits_the_machine(
    set_up: Any, python: Path, indexes: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    pip_index: str, cpu_index: str, has_driver: bool, chosen: str, said: str,
) -> None:  # fmt: skip
    pip_reads(monkeypatch, indexes[pip_index])
    monkeypatch.setattr(set_up, "has_nvidia_driver", lambda: has_driver)
    choice = set_up.choose_torch(python, SPEC, cpu_index=indexes[cpu_index])
    assert choice.index == (indexes[chosen] if chosen else "")
    assert said in choice.why


def test_the_users_index_goes_first_and_other_systems_have_one_build(set_up, python, indexes, monkeypatch):
    pip_reads(monkeypatch, indexes["cpu"])
    monkeypatch.setattr(set_up, "has_nvidia_driver", lambda: True)
    assert set_up.choose_torch(python, SPEC, indexes["cuda"]).index == indexes["cuda"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert set_up.choose_torch(python, SPEC, cpu_index=indexes["refuses"]).index == ""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("users", "said"),
    [("refuses", "refused"), ("hangs", "no answer in 0.5 seconds")],
)
def test_the_users_index_that_cannot_be_used_is_named_and_set_up_goes_on(
    set_up: Any, python: Path, indexes: dict[str, str], monkeypatch: pytest.MonkeyPatch, users: str, said: str
) -> None:
    pip_reads(monkeypatch, indexes["cuda"])
    if users == "refuses":  # also where pip finds torch in another index of its own
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", indexes["cuda"])
    choice = set_up.choose_torch(python, SPEC, indexes[users], cpu_index=indexes["cpu"])
    assert choice.index == indexes["cpu"]
    assert choice.why.startswith(f"TORCH_INDEX={indexes[users]} cannot be used (")
    assert said in choice.why
    assert "taken instead: torch's CPU build, because no NVIDIA driver answers" in choice.why


@pytest.mark.parametrize(
    ("script", "answers"),
    [("echo 'GPU 0: NVIDIA H100'", True), ("echo 'GPU 0'; exit 9", False), ("echo 'No devices'", False), ("", False)],
)
def test_a_driver_answers_by_nvidia_smi(tmp_path: Path, script: str, answers: bool) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    program = "import set_up; print(set_up.has_nvidia_driver())"
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(answers)


@pytest.mark.one_in(2, "environments with pip")
def test_torch_is_installed_once_and_failures_have_pip_s_words(
    set_up: Any, python: Path, indexes: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pip_reads(monkeypatch, indexes["cuda"])
    installed: list[list[str]] = []
    real = set_up.install

    def install(python: Path, what: str, arguments: list[str]) -> None:
        installed.append(arguments)
        if what == "torch":
            real(python, what, arguments)

    monkeypatch.setattr(set_up, "install", install)
    for _ in range(2):
        set_up.set_up(python.parents[1], "plot", SPEC, "", cpu_index=indexes["cpu"])
    assert [arguments[-1].rpartition("[")[2] for arguments in installed] == [SPEC, "plot]", "plot]"]
    told = capsys.readouterr().out
    assert "torch's CPU build, because no NVIDIA driver answers" in told
    assert "make TORCH_INDEX=" in told
    assert "torch: " in told
    assert "done" in told
    assert "packages, 0.0" in told
    assert "torch==2.13.0" in (python.parents[1] / "constraints.txt").read_text().splitlines()
    with pytest.raises(set_up.SetUpError, match=r"(?s)No matching distribution.*could not install nothing"):
        real(python, "nothing", ["no-such-package-anywhere"])


@pytest.mark.one_in(2, "environments with pip")
def test_an_interrupted_set_up_is_made_whole_and_a_place_that_is_none_is_named(set_up, tmp_path, monkeypatch, capsys):
    venv.create(tmp_path / "venv")  # as Ctrl-C leaves it: Python, and no pip yet
    monkeypatch.setattr(set_up, "choose_torch", lambda *_, **__: None)
    installed: list[str] = []
    monkeypatch.setattr(set_up, "install", lambda python, what, arguments: installed.append(what))
    monkeypatch.setattr(sys, "argv", ["set_up.py", str(tmp_path / "venv")])
    assert set_up.main() == 0
    assert installed == ["manyheads[plot]"]
    assert list((tmp_path / "venv").glob("lib/python3*/site-packages/pip"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["set_up.py", str(tmp_path / "file" / "venv")])
    capsys.readouterr()
    assert set_up.main() == 2
    assert f"set-up: {tmp_path / 'file' / 'venv'} cannot be made: " in capsys.readouterr().err

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(set_up, "choose_torch", interrupt)
    monkeypatch.setattr(sys, "argv", ["set_up.py", str(tmp_path / "venv")])
    assert set_up.main() == 130
    assert "the same command goes on" in capsys.readouterr().err
