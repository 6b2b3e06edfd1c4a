"""Disk full and I/O errors at every system call of a save: older checkpoints live, the message is one line."""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.checkpoint.format import (
    apply_retention,
    find_latest,
    load_checkpoint,
    read_pointer,
    save_checkpoint,
    write_pointer,
)
from manyheads.errors import SaveError
from manyheads.files.commit import check_free_space, remove_stale, write_text

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Injector:
    """Counts calls of the operating system and fails the chosen one, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.fail_at = -1
        self.error = 0
        for name in ("fsync", "rename", "replace", "mkdir", "open"):
            monkeypatch.setattr(os, name, self.guard(getattr(os, name)))
        opened = self.guard(io.open)

        def open_guarded(*args: Any, **kwargs: Any) -> Any:
            file = opened(*args, **kwargs)
            if set(file.mode) & set("wx"):
                file = Writer(file, self.guard(file.write))
            return file

        monkeypatch.setattr(io, "open", open_guarded)

    def guard(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail_at:
                raise OSError(self.error, os.strerror(self.error))
            return call(*args, **kwargs)

        return guarded

    def arm(self, fail_at: int, error: int) -> None:
        self.calls, self.fail_at, self.error = 0, fail_at, error


class Writer:
    """A file whose `write` may fail."""

    def __init__(self, file: Any, write: Callable[..., Any]) -> None:
        self.file, self.write = file, write

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def save(folder: Path, step: int) -> Path:
    tensors = {"model": {"w": torch.full((5,), float(step))}, "optimiser": {"m": torch.ones(5)}}
    path = save_checkpoint(folder, step, tensors, {"value": step})
    write_pointer(folder, "latest", path)
    apply_retention(folder, 2)
    return path


def test_every_injection_point_leaves_older_checkpoints_and_one_line(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    injector = Injector(monkeypatch)
    injector.arm(-1, 0)
    save(tmp_path, 3)
    points = injector.calls
    assert points > 20
    refused = 0
    for number in range(points):
        error = ERRORS[number % len(ERRORS)]
        step = 10 + number
        before, _ = find_latest(tmp_path)
        assert before is not None
        injector.arm(number + 1, error)
        try:
            save(tmp_path, step)
        except SaveError as failure:
            refused += 1
            text = str(failure)
            assert "\n" not in text
            assert str(tmp_path) in text
            assert os.strerror(error) in text
            assert "bytes are free" in text
        injector.arm(-1, 0)
        assert load_checkpoint(before).scalars["value"] <= step
        latest, skipped = find_latest(tmp_path)
        assert latest is not None
        assert not skipped
        save(tmp_path, step)
        remove_stale(tmp_path)
        assert not [name for name in names(tmp_path) if ".tmp-" in name]
        assert read_pointer(tmp_path, "latest") == tmp_path / f"step-{step:08d}"
    assert refused > points - 12  # errors while cleaning up are survived in silence


def test_every_kind_of_error_is_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (*ERRORS, errno.EFBIG, errno.EMFILE):

        def fail(handle: int, code: int = error) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(SaveError, match=os.strerror(error)):
                save_checkpoint(tmp_path / "run", 1, {}, {})
            with pytest.raises(SaveError, match=os.strerror(error)):
                write_text(tmp_path / "latest", "x")
        assert list(tmp_path.rglob("*.*")) == []


def test_a_real_limit_on_file_size_is_told_and_survived(tmp_path: Path) -> None:
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(SaveError, match=r"File too large.*ulimit"):
            save_checkpoint(tmp_path, 2, {"model": {"w": torch.zeros(100_000)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(names(tmp_path)) == {"step-00000001", "latest"}
    load_checkpoint(tmp_path / "step-00000001")


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(SaveError, match=r"No space left.*1000 bytes are free"):
        save_checkpoint(tmp_path / "run", 1, {"model": {"w": torch.zeros(10)}}, {})
    assert not (tmp_path / "run").exists()
    check_free_space(tmp_path, 1000)
    with pytest.raises(SaveError, match="1001 bytes are needed"):
        check_free_space(tmp_path, 1001)


@pytest.mark.parametrize("save", [lambda path: write_text(path, "x"), lambda path: save_checkpoint(path, 1, {}, {})])
def test_the_free_space_is_that_of_the_failure(save, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)

    def fail(handle: int) -> None:
        if list(tmp_path.rglob("*.tmp-*")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def used(path: Path) -> object:
        return usage._replace(free=7) if list(tmp_path.rglob("*.tmp-*")) else usage

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(shutil, "disk_usage", used)
    with pytest.raises(SaveError, match=r"[( ]7 bytes are free"):
        save(tmp_path / "saved")
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(SaveError):
        save_checkpoint(tmp_path / "run", 1, {}, {})
