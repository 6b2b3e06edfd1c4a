"""Files under whose name something else lies: links, pipes, devices, sockets, folders, files that are too large."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyheads.files.safe_open import (
    RefusedFileError,
    check_no_link,
    check_regular,
    check_writable_file,
    open_in_place,
    open_to_append,
    read_limited,
)

KEPT = b"a thesis\n"
LIMIT = 100


def link_to_file(path: Path) -> None:
    path.with_name("kept").write_bytes(KEPT)
    path.symlink_to("kept")


def dangling_link(path: Path) -> None:
    path.symlink_to("new")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def linked_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def listening_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the whole path is longer than a socket's address may be
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def linked_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.mkdir()


needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
needs_zero = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
needs_sockets = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no sockets in folders")

Put = Callable[[Path], None]
UNREADABLE = [
    pytest.param(pipe, "a named pipe", marks=needs_pipes),
    pytest.param(linked_pipe, "a named pipe", marks=needs_pipes),
    pytest.param(linked_device, "a device", marks=needs_zero),
    pytest.param(listening_socket, "a socket", marks=needs_sockets),
    pytest.param(directory, "a directory"),
]
UNWRITABLE = [
    (link_to_file, "a symbolic link"),
    (dangling_link, "a symbolic link"),
    pytest.param(pipe, "a named pipe", marks=needs_pipes),
    pytest.param(linked_pipe, "a symbolic link", marks=needs_pipes),
    pytest.param(linked_device, "a symbolic link", marks=needs_zero),
    pytest.param(listening_socket, "a socket", marks=needs_sockets),
    (directory, "a directory"),
]


@pytest.fixture(params=["with the system's flags", "without them, as on Windows"], autouse=True)
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds in both cases. Without the flags, opening a pipe would wait for ever."""
    if request.param.startswith("without"):
        for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY"):
            monkeypatch.delattr(os, name, raising=False)


@pytest.mark.parametrize(("put", "kind"), UNREADABLE)
def test_only_regular_files_are_read(tmp_path: Path, put: Put, kind: str) -> None:
    put(tmp_path / "file")
    before = len(list(Path("/dev/fd").iterdir())) if Path("/dev/fd").is_dir() else 0
    for read in (lambda path: read_limited(path, LIMIT), check_regular):
        with pytest.raises(RefusedFileError) as caught:
            read(tmp_path / "file")
        assert str(caught.value) == f"it is {kind}, not a regular file; replace it by the right file"
        assert caught.value.filename == str(tmp_path / "file")
    assert before == (len(list(Path("/dev/fd").iterdir())) if before else 0), "a file was left open"


@pytest.mark.parametrize("size", [0, 1, LIMIT])
def test_what_is_within_the_limit_is_read_whole_and_through_links(tmp_path: Path, size: int) -> None:
    content = bytes(range(size))
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "link").symlink_to("file")
    assert read_limited(tmp_path / "file", LIMIT) == read_limited(tmp_path / "link", LIMIT) == content
    check_regular(tmp_path / "link")


def test_what_is_larger_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 40)  # a sparse file: reading it would end the test
    with pytest.raises(RefusedFileError, match="it has 1,099,511,627,776 bytes, and at most 100 bytes"):
        read_limited(path, LIMIT)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")
def test_a_size_that_is_not_true_is_not_believed() -> None:
    """Files below /proc have the size 0; so may a file that another process is writing."""
    path = Path("/proc/self/status")
    assert path.stat().st_size == 0
    assert read_limited(path, 1 << 20).startswith(b"Name:")
    with pytest.raises(RefusedFileError, match="it has more than 100 bytes, and at most 100 bytes"):
        read_limited(path, LIMIT)


def test_missing_files_are_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nothing")
    for name in ("none", "link"):
        with pytest.raises(FileNotFoundError):
            read_limited(tmp_path / name, LIMIT)
        check_regular(tmp_path / name)


@pytest.mark.parametrize(("put", "kind"), UNWRITABLE)
def test_nothing_is_written_but_to_regular_files(tmp_path: Path, put: Put, kind: str) -> None:
    put(tmp_path / "file")
    names = sorted(tmp_path.iterdir())

    def open_and_close(path: Path) -> None:
        os.close(open_in_place(path, os.O_RDWR | os.O_CREAT, 0o644))

    for write in (open_and_close, open_to_append, check_writable_file):
        with pytest.raises(RefusedFileError) as caught:
            write(tmp_path / "file")
        assert str(caught.value) == f"it is {kind}, not a regular file; remove it, or choose another folder"
    assert sorted(tmp_path.iterdir()) == names
    assert put is not link_to_file or (tmp_path / "kept").read_bytes() == KEPT


def test_regular_files_are_made_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    check_writable_file(path)
    for line in (b"one\n", b"two\n"):
        with open_to_append(path) as file:
            assert file.tell() == (0 if line == b"one\n" else 4)
            file.write(line)
    assert path.read_bytes() == b"one\ntwo\n"
    check_writable_file(path)
    handle = open_in_place(path, os.O_RDWR | os.O_CREAT, 0o644)
    assert os.read(handle, 3) == b"one"
    os.close(handle)
    if os.name == "posix":
        assert not stat.S_IMODE(path.stat().st_mode) & 0o111


def test_folders_are_told_from_links_to_folders(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("nothing")
    check_no_link(tmp_path / "folder")
    check_no_link(tmp_path / "none")
    for name in ("link", "dangling"):
        with pytest.raises(RefusedFileError, match="it is a symbolic link to another place; remove it, or choose"):
            check_no_link(tmp_path / name)


def test_a_junction_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' other link to a folder, which it reports as a folder; no such thing can be made elsewhere."""
    status = SimpleNamespace(st_mode=stat.S_IFDIR | 0o755, st_reparse_tag=0xA0000003)
    monkeypatch.setattr(Path, "lstat", lambda path: status)
    with pytest.raises(RefusedFileError, match="it is a junction to another place"):
        check_no_link(tmp_path)


@needs_pipes
def test_the_open_file_is_checked_not_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exchanged between a look at the name and the opening is refused all the same."""
    if not hasattr(os, "O_NONBLOCK"):
        pytest.skip("without the flags a name is all there is")
    pipe(tmp_path / "pipe")
    link_to_file(tmp_path / "link")
    seen = (tmp_path / "kept").lstat()
    for look in ("stat", "lstat"):
        monkeypatch.setattr(Path, look, lambda path, **options: seen)
    with pytest.raises(RefusedFileError, match="a named pipe"):
        read_limited(tmp_path / "pipe", LIMIT)
    with pytest.raises(RefusedFileError, match="a named pipe"):
        open_in_place(tmp_path / "pipe", os.O_RDWR, 0o644)
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(tmp_path / "link")
    assert (tmp_path / "kept").read_bytes() == KEPT
