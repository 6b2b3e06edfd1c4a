"""No file that anybody could hand to manyheads makes it do anything but refuse (R5)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile.artefacts import ARTEFACTS
from slices import drawn

TESTS = Path(__file__).resolve().parents[1]
MOST_LINES = 11
"""Of a message: ten, and the progress line that may stand before them."""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a process that can import `hostile`."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a module that is imported late would be seen as a side effect
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def offered(folder: Path, mode: str) -> list[dict[str, Any]]:
    """What became of every call; the honest files that artefacts were made from are as they were."""
    result = python("-m", "hostile.child", str(folder), mode)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout)
    assert report["honest_files_unchanged"]
    return list(report["records"])


def wrong(record: dict[str, Any]) -> bool:
    """Anything but a refusal: exit code 2, a message of a few lines, nothing done."""
    said = record["stderr"].rpartition("manyheads: ")[2] or record["stdout"]
    return bool(
        record["code"] != 2
        or record["effects"]
        or not said.strip()
        or said.count("\n") > MOST_LINES
        or "Traceback" in record["stderr"]
        or "\x1b" in said
    )


def test_every_artefact_is_refused(tmp_path: Path) -> None:
    """Each of a slice is offered to the first of those who might read it; the long check offers all to all."""
    records = offered(tmp_path, "quick")
    chosen = drawn(len(ARTEFACTS), 10, "artefacts")
    assert len(records) == sum(not ARTEFACTS[place].slow for place in chosen) >= 10
    assert [record for record in records if wrong(record)] == []


@pytest.mark.slow
def test_every_artefact_is_refused_by_everyone(tmp_path: Path, figure: Callable[..., None]) -> None:
    records = offered(tmp_path, "full")
    bad = [record for record in records if wrong(record)]
    refused = {record["artefact"] for record in records} - {record["artefact"] for record in bad}
    figure(
        "R5",
        "hostile artefacts",
        artefacts=len(ARTEFACTS),
        calls=len(records),
        refused=len(refused),
        side_effects=sum(len(record["effects"]) for record in records),
    )
    assert bad == []
    assert len(refused) == len(ARTEFACTS)


GUARDED = """
import json, os, pickle, shutil, socket, subprocess, sys
from pathlib import Path
import numpy, torch, yaml
from hostile.guard import Guard, SideEffectError
from hostile.pickles import PICKLES
work, outside = Path(sys.argv[1]), Path(sys.argv[2])
canary = work / "canary"
payload = work / "payload"
payload.write_bytes(PICKLES["global-os-system"](canary))
guard = Guard(work, child="some-child")
caught = []
for what, code in json.loads(sys.argv[3]).items():
    try:
        with guard.armed():
            exec(code)
    except SideEffectError:
        caught.append(what)
print(json.dumps({"caught": caught, "seen": len(guard.seen), "ran": canary.exists()}))
"""
CAUGHT = {
    "pickle": "pickle.loads(payload.read_bytes())",
    "torch.load": "torch.load(payload, weights_only=False)",
    "numpy": "numpy.load(payload, allow_pickle=True)",
    "YAML": "yaml.unsafe_load(\"!!python/object/apply:os.system ['true']\")",
    "a shell": "os.system('true')",
    "a process": "subprocess.run(['true'])",
    "fork": "os.fork()",
    "exec": "os.execv('/bin/true', ['true'])",
    "a connection": "socket.create_connection(('127.0.0.1', 9), timeout=0.1)",
    "writing": "open(outside / 'new', 'w')",
    "appending": "open(outside / 'kept', 'a')",
    "opening to write": "os.open(outside / 'new', os.O_CREAT | os.O_WRONLY)",
    "removing": "(outside / 'kept').unlink()",
    "removing a folder": "shutil.rmtree(outside)",
    "renaming": "(outside / 'kept').rename(outside / 'gone')",
    "making a folder": "(outside / 'new').mkdir()",
    "a link": "(outside / 'new').symlink_to(work)",
    "an odd module": "import antigravity",
}


def test_the_guard_sees_what_it_is_to_see(tmp_path: Path) -> None:
    """Artefacts that are truly executed, and effects of every kind, trip it before they happen."""
    work, outside = tmp_path / "work", tmp_path / "outside"
    for folder in (work, outside):
        folder.mkdir()
    (outside / "kept").write_text("kept")
    result = python("-c", GUARDED, str(work), str(outside), json.dumps(CAUGHT))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"caught": list(CAUGHT), "seen": len(CAUGHT), "ran": False}
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_text() == "kept"
