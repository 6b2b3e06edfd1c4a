"""Opening files of possibly external origin.

A folder that was sent or downloaded can contain a symbolic link, a named pipe or a device under any name. Writing
through a link changes a file elsewhere. Opening a pipe waits forever. Reading a device such as /dev/zero fills the
memory. So the functions here open without waiting, check that the open file is a regular file, and read no more than a
limit. Those that write do not follow a link in the last part of the path; the caller checks the folders above it with
`check_no_link`.

This module is the one place where files are opened for reading. `open_regular` and `read_limited` are for files of
folders, `open_stream` for what the user named, which may be a pipe. `tests/unit/files/test_opening.py` lists the
exceptions.

Windows has neither O_NOFOLLOW nor O_NONBLOCK; there the type is checked by name before the file is opened.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import time
from collections.abc import Callable
from pathlib import Path

_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISREG, "a regular file"),
)
_READ_REMEDY = "replace it by the right file"
WRITER_SECONDS = 2.0
_WRITE_REMEDY = "remove it, or choose another folder"
_JUNCTION = 0xA0000003  # stat.IO_REPARSE_TAG_MOUNT_POINT, which only Windows has: a link to a folder


class RefusedFileError(OSError):
    """The file has a kind or a size that we refuse to open. `strerror` and `str` give the reason and the remedy.

    It is an OSError so that a caller which reports that a file cannot be read or written reports this as well.
    """

    def __str__(self) -> str:
        return str(self.strerror)


def read_limited(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file, or of one that a symbolic link leads to.

    Args:
        path: the file.
        most_bytes: the size above which it is refused. No more than that is read.

    Raises: RefusedFileError: it is not a regular file, or is too large. OSError: it cannot be read.
    """

    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b""
        if size <= most_bytes:
            content = file.read(size + 1)
            if len(content) > size:  # it grows while it is read, or reports no size
                content += file.read(most_bytes - size)
    if max(size, len(content)) > most_bytes:
        found = f"{size:,}" if size > most_bytes else f"more than {most_bytes:,}"
        reason = f"it has {found} bytes, and at most {most_bytes:,} bytes are read; {_READ_REMEDY}"
        raise RefusedFileError(errno.EINVAL, reason, str(path))
    return content


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file, or one that a symbolic link leads to, for reading.

    Raises: RefusedFileError: it is not a regular file. OSError: it cannot be opened.
    """

    def opener(name: str, flags: int) -> int:
        return _open_regular(Path(name), flags, follow=True, remedy=_READ_REMEDY)

    return open(path, "rb", opener=opener)


def open_stream(path: Path) -> io.BufferedReader:
    """Open a file that the user named, for reading: a regular file, a pipe, a terminal or the null device.

    A named pipe is waited for, because the shell's `<(command)` is one. Another device is refused: /dev/zero never
    ends.

    Raises: RefusedFileError: it is another device. OSError: it cannot be opened.
    """
    file = path.open("rb")
    try:
        _refuse_device(file.fileno(), path)
    except OSError:
        file.close()
        raise
    return file


def read_stream(path: Path, most_bytes: int, check: Callable[[os.stat_result], None] = lambda status: None) -> bytes:
    """Return the content of what the user named, as `open_stream`, but do not wait for ever for a pipe to be opened.

    Args:
        most_bytes: no more than one byte above it is read; the caller compares.
        check: is called with the status of the opened file before it is read, and may raise.

    Raises: RefusedFileError: it is a device, or nobody writes into the pipe within WRITER_SECONDS. OSError: it cannot
        be read.
    """
    if not hasattr(os, "O_NONBLOCK"):
        with open_stream(path) as file:
            check(os.fstat(file.fileno()))
            return file.read(most_bytes + 1)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", buffering=0, opener=opener) as raw:
        _refuse_device(raw.fileno(), path)
        status = os.fstat(raw.fileno())
        check(status)
        is_pipe = stat.S_ISFIFO(status.st_mode)
        content = b""
        until = time.monotonic() + WRITER_SECONDS
        while len(content) <= most_bytes:
            chunk = raw.read(most_bytes + 1 - len(content))
            if chunk is None:  # a writer exists, and will write
                select.select([raw], [], [])
                continue
            content += chunk
            if chunk == b"" and is_pipe and not content and time.monotonic() < until:
                time.sleep(0.02)
            elif chunk == b"":
                break
        if is_pipe and not content:
            raise RefusedFileError(errno.EINVAL, "nobody writes into this pipe; name a file", str(path))
        return content


def open_to_append(path: Path) -> io.FileIO:
    """Open a regular file to append, unbuffered; it is created if it is missing.

    Raises: RefusedFileError: it is a link or not a regular file. OSError: it cannot be opened.
    """

    def opener(name: str, flags: int) -> int:
        return open_in_place(Path(name), flags, 0o666)

    return open(path, "ab", buffering=0, opener=opener)


def open_in_place(path: Path, flags: int, mode: int) -> int:
    """Open a regular file with `os.open` for writing in place, but never through a link.

    Args:
        path: the file.
        flags: see `os.open`; without O_TRUNC, which would empty the file before it is checked.
        mode: permissions of a new file, before the umask.

    Returns: a file descriptor.
    Raises: RefusedFileError: it is a link or not a regular file. OSError: it cannot be opened.
    """
    return _open_regular(path, flags, mode, follow=False, remedy=_WRITE_REMEDY)


def check_writable_file(path: Path) -> None:
    """Refuse early a file that `open_in_place` and `open_to_append` would refuse.

    Raises: RefusedFileError: it exists, and is a link or not a regular file. OSError: this cannot be determined.
    """
    _check_name(path, follow=False, remedy=_WRITE_REMEDY)


def check_no_link(folder: Path) -> None:
    """Refuse a folder that is a link, or on Windows a junction: files written into it would be stored elsewhere.

    Raises: RefusedFileError: it is one. OSError: this cannot be determined.
    """
    try:
        found = _kind(folder.lstat())
    except FileNotFoundError:
        return
    if found in ("a symbolic link", "a junction"):
        raise RefusedFileError(errno.EINVAL, f"it is {found} to another place; {_WRITE_REMEDY}", str(folder))


def check_regular(path: Path) -> None:
    """Refuse a file that a library that opens it by name would wait for or read forever. Links are followed.

    Raises: RefusedFileError: it exists, and is not a regular file. OSError: this cannot be determined.
    """
    _check_name(path, follow=True, remedy=_READ_REMEDY)


def _refuse_device(handle: int, path: Path) -> None:
    """Raise RefusedFileError for an open device other than a terminal and the null device."""
    status = os.fstat(handle)
    is_device = stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode)
    if is_device and not os.isatty(handle) and status.st_rdev != Path(os.devnull).stat().st_rdev:
        reason = "it is a device, which may never end; name a file or a pipe"
        raise RefusedFileError(errno.EINVAL, reason, str(path))


def _open_regular(path: Path, flags: int, mode: int = 0o666, *, follow: bool, remedy: str) -> int:
    guards = {name: getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_NOCTTY")}
    if not guards["O_NONBLOCK"] or not guards["O_NOFOLLOW"]:
        _check_name(path, follow=follow, remedy=remedy)
    if follow:
        guards["O_NOFOLLOW"] = 0
    try:
        handle = os.open(path, flags | guards["O_NONBLOCK"] | guards["O_NOFOLLOW"] | guards["O_NOCTTY"], mode)
    except OSError:
        _check_name(path, follow=follow, remedy=remedy)  # its message is more precise than the system's
        raise
    try:
        _check_kind(path, os.fstat(handle), remedy)
    except OSError:
        os.close(handle)
        raise
    return handle


def _check_name(path: Path, *, follow: bool, remedy: str) -> None:
    try:
        status = path.stat() if follow else path.lstat()
    except FileNotFoundError:
        return
    _check_kind(path, status, remedy)


def _check_kind(path: Path, status: os.stat_result, remedy: str) -> None:
    found = _kind(status)
    if found != "a regular file":
        raise RefusedFileError(errno.EINVAL, f"it is {found}, not a regular file; {remedy}", str(path))


def _kind(status: os.stat_result) -> str:
    if getattr(status, "st_reparse_tag", 0) == _JUNCTION:
        return "a junction"
    return next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "of an unknown kind")
