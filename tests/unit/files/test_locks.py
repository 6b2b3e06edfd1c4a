"""Locks where the system has none: the lock file tells which process wrote it, and its id may be given again."""

import os
import sys
from pathlib import Path

import pytest

from manyheads.errors import ConfigError
from manyheads.files import output_safety
from manyheads.files.commit import place_of_processes
from manyheads.files.output_safety import began_at, locked

HERE = place_of_processes()
PARENT = os.getppid()  # a process that lives and is not this one
LONG_AGO = "1"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(output_safety, "fcntl", None)
    return tmp_path / ".lock"


def try_lock(path: Path) -> str:
    """Return what a refusal says of the owner; empty: the lock was free."""
    try:
        with locked(path, ConfigError):
            assert path.read_text("utf-8").split() == [
                str(os.getpid()), output_safety.began_at(os.getpid()) or "-", HERE, os.uname().nodename
            ]  # fmt: skip
    except ConfigError as error:
        return str(error)
    assert path.read_text("utf-8") == ""
    return ""


@pytest.mark.parametrize(
    "content",
    ["", "\n", "no number", f"{2**22 + 1} {LONG_AGO} {HERE} h", f"{2**22 + 1}\n", f"{PARENT} {LONG_AGO} {HERE} h"],
    ids=["empty", "a line break", "text", "a process that ended", "of an older version", "an id that was given again"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell when a process began")
def test_a_lock_of_nobody_is_free(lock: Path, content: str) -> None:
    lock.write_text(content, "utf-8")
    assert try_lock(lock) == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"{PARENT} {began_at(PARENT) or '-'} {HERE} h\n", "{pid}"),
        (f"{PARENT}\n", "{pid} (if that is another program by now, remove {lock})"),
        (f"{PARENT} - {HERE} h\n", "{pid} (if that is another program by now, remove {lock})"),
        (f"{PARENT} 1 another h\n", "{pid} of h, which is not seen from here (if it has ended, remove {lock})"),
    ],
    ids=["it lives", "of an older version", "its beginning is not known", "another machine"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell when a process began")
def test_a_lock_of_a_process_that_may_live_is_taken(lock: Path, content: str, said: str) -> None:
    lock.write_text(content, "utf-8")
    assert try_lock(lock) == said.format(pid=PARENT, lock=lock)
    assert lock.read_text("utf-8") == content


def test_a_system_that_does_not_tell_when_a_process_began(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_safety, "began_at", lambda pid: None)
    lock.write_text(f"{PARENT} {LONG_AGO} {HERE} h\n", "utf-8")
    assert try_lock(lock) == f"{PARENT} (if that is another program by now, remove {lock})"
