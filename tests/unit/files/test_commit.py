"""Atomic, durable writes: order of system calls, readers that never see a half, replacement."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from manyheads.errors import SaveError
from manyheads.files import commit
from manyheads.files.commit import (
    make_folder,
    remove_folder,
    remove_stale,
    temporary_name,
    write_folder,
    write_output,
    write_text,
)
from manyheads.files.verify import MANIFEST, verify_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"a" * 1000)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.txt").write_text("b", encoding="utf-8")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every fsync, rename and opening for writing, in order, with the path's name."""
    record: list[tuple[str, str]] = []
    real_fsync, real_rename, real_replace, real_open = os.fsync, os.rename, os.replace, io.open

    def fsync(handle: int) -> None:
        record.append(("fsync", Path(f"/proc/self/fd/{handle}").readlink().name))
        real_fsync(handle)

    def rename(old: Path, new: Path) -> None:
        record.append(("rename", Path(new).name))
        real_rename(old, new)

    def replace(old: Path, new: Path) -> None:
        record.append(("rename", Path(new).name))
        real_replace(old, new)

    def opened(file: object, mode: str = "r", *args: object, **kwargs: object) -> object:
        if set(mode) & set("wx"):
            record.append(("write", Path(str(file)).name))
        return real_open(file, mode, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(io, "open", opened)
    return record


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_everything_is_synced_before_the_rename_and_the_parent_after(tmp_path, calls):
    write_folder(tmp_path / "final", fill)
    rename = calls.index(("rename", "final"))
    aside = temporary_name(tmp_path / "final").name
    for name in ("a.bin", "b.txt", "sub", MANIFEST, aside):
        assert ("fsync", name) in calls[:rename], name
    assert calls[rename + 1 :] == [("fsync", tmp_path.name)]
    written = [name for kind, name in calls if kind == "write"]
    assert written[-1] == MANIFEST
    assert calls.index(("fsync", "a.bin")) < calls.index(("write", MANIFEST))
    assert calls.index(("fsync", MANIFEST)) < calls.index(("fsync", aside))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_text_file_is_synced_before_the_rename_and_the_parent_after(tmp_path, calls):
    write_text(tmp_path / "latest", "one\n")
    aside = temporary_name(tmp_path / "latest").name
    assert calls == [("write", aside), ("fsync", aside), ("rename", "latest"), ("fsync", tmp_path.name)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_new_parents_are_synced_into_theirs(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    make_folder(tmp_path / "runs" / "one")
    assert calls == [("fsync", tmp_path.name), ("fsync", "runs")]
    make_folder(tmp_path / "runs" / "one")
    assert len(calls) == 2


def test_a_folder_that_was_cut_off_between_two_renames_gets_its_name_back(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "swap", lambda new, old: False)  # a file system that cannot
    final = tmp_path / "model"
    write_folder(final, lambda folder: (folder / "old").write_text("1", encoding="utf-8") and None)

    def killed(path: Path, target: Path) -> None:
        real(path, target)
        raise KeyboardInterrupt

    real = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr(shutil, "rmtree", lambda path, **options: None)  # a killed process cleans nothing up
        with pytest.raises(KeyboardInterrupt):
            write_folder(final, fill)
    assert not final.exists()
    remove_stale(tmp_path)
    verify_folder(final)
    assert (final / "old").exists()
    assert names(tmp_path) == ["model"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    final = tmp_path / "model"
    write_folder(final, lambda folder: (folder / "old").write_text("1", encoding="utf-8") and None)
    write_folder(final, fill)
    verify_folder(final)
    assert not (final / "old").exists()
    assert names(tmp_path) == ["model"]


def test_a_folder_is_replaced_where_names_cannot_be_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "elsewhere")
    final = tmp_path / "model"
    write_folder(final, lambda folder: (folder / "old").write_text("1", encoding="utf-8") and None)
    write_folder(final, fill)
    verify_folder(final)
    assert names(tmp_path) == ["model"]


def test_an_interrupted_write_leaves_the_old_folder(tmp_path: Path) -> None:
    final = tmp_path / "model"
    write_folder(final, fill)

    def interrupted(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(final, interrupted)
    verify_folder(final)
    assert names(tmp_path) == ["model"]


def of_process(pid: int, name: str, place: str = "") -> str:
    """The temporary name that a process of this id gives to a file; place: of another machine."""
    return f"{name}.tmp-{pid}-{place or temporary_name(Path(name)).name[-16:]}"


@pytest.fixture
def dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_stale_folders_of_dead_processes_go_and_of_living_ones_stay(tmp_path: Path, dead: int) -> None:
    stale, own, living = (of_process(pid, "step-00000001") for pid in (dead, os.getpid(), os.getppid()))
    for name in (stale, own, living, "notes.tmp-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert remove_stale(tmp_path) == ["notes.tmp-x"]
    assert set(names(tmp_path)) == {living, "notes.tmp-x"}


def test_what_a_killed_process_left_of_a_folder_goes_with_its_next_write(tmp_path: Path, dead: int) -> None:
    for name in ("folder", "other"):
        (tmp_path / of_process(dead, name)).mkdir()
    write_folder(tmp_path / "folder", fill)
    assert names(tmp_path) == ["folder", of_process(dead, "other")]


def test_what_a_user_named_like_a_temporary_folder_stays(tmp_path: Path, dead: int) -> None:
    """A date, the process id of an older version, this process's own id: none has the mark."""
    mine = [f"out.tmp-{end}" for end in (99999, 20261127, dead, os.getpid(), f"{dead}-1", f"{dead}-0123abcd", "")]
    mine += [f"out.old.tmp-{dead}", of_process(dead, "out").upper(), f"{of_process(dead, 'out')}.txt"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("precious", encoding="utf-8")
    write_folder(tmp_path / "out", fill)
    write_folder(tmp_path / "out", fill)
    write_text(tmp_path / "out.txt", "text")
    assert set(remove_stale(tmp_path)) == {name for name in mine if ".tmp-" in name}
    remove_folder(tmp_path / "out")
    assert names(tmp_path) == sorted([*mine, "out.txt"])
    assert all((tmp_path / name / "x").read_text(encoding="utf-8") == "precious" for name in mine)


def test_the_same_process_id_in_another_container_is_another_process(tmp_path, monkeypatch):
    """On a shared volume each of two containers has its process 1, and the other one's is not to be seen."""
    other = of_process(os.getpid(), "out", "0123456789abcdef")
    (tmp_path / other / "sub").mkdir(parents=True)
    (tmp_path / other / "sub" / "file").touch()
    write_folder(tmp_path / "out", fill)
    assert remove_stale(tmp_path, "out") == [other]
    assert (tmp_path / other / "sub" / "file").exists()
    here = commit.place_of_processes.__wrapped__()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert commit.place_of_processes.__wrapped__() != here


def test_what_another_machine_left_goes_after_a_day_without_a_change(tmp_path: Path) -> None:
    other = tmp_path / of_process(1, "out", "0123456789abcdef")
    (other / "sub").mkdir(parents=True)
    (other / "sub" / "file").touch()
    for path in (other, other / "sub"):
        os.utime(path, (0, 0))
    assert remove_stale(tmp_path) == [other.name]  # a file in it is new
    for path in (other / "sub" / "file", other / "sub", other):
        os.utime(path, (0, 0))
    assert remove_stale(tmp_path) == []
    assert names(tmp_path) == []


def test_a_folder_that_appeared_in_the_meantime_is_kept(tmp_path: Path) -> None:
    """As when the same command runs twice: the slower one does not replace what the other has written."""
    final = tmp_path / "folder"

    def fill_slowly(folder: Path) -> None:
        final.mkdir()
        (final / "first").touch()
        fill(folder)

    with pytest.raises(
        SaveError, match=r"folder was created by another command in the meantime, so it is not replaced"
    ):
        write_folder(final, fill_slowly, replace=False)
    assert names(tmp_path) == ["folder"]
    assert names(final) == ["first"]
    shutil.rmtree(final)
    write_folder(final, fill, replace=False)
    verify_folder(final)


def test_removal_frees_the_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "step-00000001", fill)
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: None)  # killed before the first file is gone
    remove_folder(tmp_path / "step-00000001")
    assert names(tmp_path) == [temporary_name(tmp_path / "step-00000001").name]


def test_an_output_goes_through_a_link_and_into_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    for content in (b"one", b"two"):
        write_output(tmp_path / "link", content)
        assert (tmp_path / "real" / "file").read_bytes() == content
        assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output(tmp_path / "pipe", b"three")
        assert os.read(reader, 10) == b"three"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["link", "pipe", "real"]


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("old", encoding="utf-8")
    path.chmod(0o600)
    write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert path.stat().st_mode & 0o777 == 0o600
