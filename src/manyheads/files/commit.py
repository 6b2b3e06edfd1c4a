"""Operating-system errors while saving, in one line: the path, the reason, the space that is needed and free.

Atomic writing: a crash at any moment leaves either the complete old file or the complete new one.

Order: write aside, fsync every file, manifest last, fsync the folder, rename, fsync the parent. A rename before
the fsyncs could survive a power cut in which the contents are lost.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from safetensors import SafetensorError

from manyheads.errors import SaveError
from manyheads.files.safe_open import RefusedFileError
from manyheads.files.verify import MANIFEST, list_files, list_folders, make_manifest

_REMEDIES = {
    errno.ENOSPC: "free some space or choose another folder",
    errno.EDQUOT: "free some of your quota or choose another folder",
    errno.EIO: "the disk or network drive is failing; choose another one",
    errno.EROFS: "the file system is mounted read-only; choose another folder",
    errno.EACCES: "change the permissions or choose another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or choose another folder",
}


def free_bytes(path: Path) -> int:
    """Return the number of free bytes where `path` is or will be; -1 if unknown."""
    for folder in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return -1


def check_free_space(path: Path, needed_bytes: int, *, also: str = "") -> None:
    """Check that there is enough space before writing begins.

    Args:
        path: the file or folder to write.
        needed_bytes: its size.
        also: another remedy.

    Raises: SaveError: fewer than `needed_bytes` are free where `path` is to be written.
    """
    free = free_bytes(path)
    if 0 <= free < needed_bytes:
        raise SaveError(_describe(path, errno.ENOSPC, os.strerror(errno.ENOSPC), needed_bytes) + also)


@contextmanager
def saving(path: Path, needed_bytes: int) -> Iterator[None]:
    """Convert every OSError of the block, also one that safetensors wraps, to a SaveError that names `path`."""
    try:
        yield
    except RefusedFileError as error:
        raise SaveError(f"Cannot save {path}: {error}.") from error
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise SaveError(_describe(path, code, os.strerror(code), needed_bytes)) from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise SaveError(_describe(path, error.errno or 0, reason, needed_bytes)) from error


def _describe(path: Path, code: int, reason: str, needed_bytes: int) -> str:
    free = free_bytes(path)
    space = f"{free} bytes are free" if free >= 0 else "free space unknown"
    space = f" ({needed_bytes} bytes are needed, {space})" if needed_bytes else f" ({space})"
    remedy = _REMEDIES.get(code, "check the folder, or choose another one")
    return f"Cannot save {path}: {reason}{space}. Older files are untouched; {remedy}."


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TEMPORARY = re.compile(r"(.+?)(\.old)?\.tmp-(\d+)-([0-9a-f]{16})", re.DOTALL)
_SECONDS_IDLE = 86_400  # after which a temporary file of another machine belongs to no process any more


def write_folder(
    final: Path,
    write: Callable[[Path], Mapping[str, str] | None],
    *,
    manifest: bool = True,
    needed_bytes: int = 0,
    replace: bool = True,
) -> None:
    """Create (or replace) the folder `final` in one step.

    Args:
        final: the folder's final name; it never shows an incomplete folder.
        write: writes the files into the folder that it is given. It may return the SHA-256 of some, which are then not
            read again: name -> digest.
        manifest: add a manifest, see `files.verify`; False: `write` writes its own `manifest.json`.
        needed_bytes: an estimate, compared with the free space before anything is written.
        replace: replace a folder of that name, also one that another process has written in the meantime.

    What a killed process left of the same folder is deleted.

    Raises: SaveError: the disk is full, read-only or failing, or `final` exists and is not to be replaced; nothing is
        left behind, an older `final` is unchanged.
    """
    temporary = temporary_name(final)
    try:  # deletes outside of `saving`, which tells the free space at the failure
        with saving(final, needed_bytes):
            check_free_space(final.parent, needed_bytes)
            make_folder(final.parent)
            remove_stale(final.absolute().parent, final.name)
            _discard(temporary)
            temporary.mkdir()
            known = write(temporary)
            for name in list_files(temporary):
                sync(temporary / name)
            for path in list_folders(temporary):
                sync(path)
            if manifest:
                (temporary / MANIFEST).write_bytes(make_manifest(temporary, known).encode())
            sync(temporary / MANIFEST)
            sync(temporary)
            if not os.path.lexists(final):  # a broken link is replaced too
                temporary.rename(final)
            elif not replace:
                raise SaveError(
                    f"{final} was created by another command in the meantime, so it is not replaced; choose another"
                    " folder."
                )
            elif not swap(temporary, final):
                _exchange(temporary, final)
            sync(final.parent)
    finally:
        _discard(temporary)


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably, so that a crash cannot remove them together with later contents."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.absolute().parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a parent that may be passed through but not opened
            sync(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a small text file atomically and durably.

    Raises: SaveError: it could not be written; an older file is unchanged.
    """
    write_file(path, text.encode())


def write_file(path: Path, data: bytes) -> None:
    """Replace a small file atomically and durably; see `write_text`. The permissions stay."""
    temporary = temporary_name(path)
    try:
        with saving(path, len(data)):
            make_folder(path.parent)
            if os.path.lexists(temporary):
                _discard(temporary)
            with temporary.open("xb") as file:  # x: a link of this name is never written through
                if path.is_file() and not path.is_symlink():
                    with suppress(OSError):  # some file systems have no permissions
                        shutil.copymode(path, temporary)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(path.parent)
    finally:
        _discard(temporary)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user named.

    A regular file, or the target of a link, is replaced atomically; a pipe or a device is written directly.

    Raises: SaveError: it could not be written; an older file is unchanged.
    """
    if not path.exists() or path.is_file():
        write_file(path.resolve(), data)
        return
    with saving(path, len(data)), path.open("wb") as file:
        file.write(data)


def remove_folder(folder: Path) -> None:
    """Delete a folder after renaming it, so that a crash never leaves a half-empty folder under its name."""
    temporary = temporary_name(folder)
    with saving(folder, 0):
        _discard(temporary)
        folder.rename(temporary)
        sync(folder.parent)
        _discard(temporary)


def remove_stale(parent: Path, name: str | None = None) -> list[str]:
    """Delete temporary files of dead processes, and of failed saves of this one, in `parent`.

    Args: name: the file or folder whose temporary files are deleted; None: all.

    Only names with the mark of `temporary_name` are touched. Of another machine or container, whose processes cannot be
    seen, they are deleted when nothing in them has changed for a day. If a crash came between the two renames of
    `_exchange`, the folder gets its name back instead.

    Returns: the names that look temporary but are not of this program's making, or of another machine; they stay.
    """
    left = []
    for path in sorted(parent.glob("*.tmp-*")):
        match = _TEMPORARY.fullmatch(path.name)
        if name is not None and (match[1] if match else re.split(r"(?:\.old)?\.tmp-", path.name)[0]) != name:
            continue
        if not match or (match[4] != place_of_processes() and not _is_idle(path)):
            left.append(path.name)
        elif match[4] != place_of_processes() or not is_other_process(int(match[3])):
            if match[2] and not path.with_name(match[1]).exists():
                with suppress(OSError):
                    path.rename(path.with_name(match[1]))
                    continue
            _discard(path)
    return left


def _is_idle(path: Path) -> bool:
    """Return whether nothing in a file or folder has changed for a day."""
    try:
        newest = max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    except OSError:  # it changes at this moment
        return False
    return time.time() - newest > _SECONDS_IDLE


def is_other_process(pid: int) -> bool:
    """Return whether another process with this id exists, as far as the system tells.

    If not, files with its id are leftovers. So are those of this process, which writes one file at a time.
    """
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def swap(new: Path, old: Path) -> bool:
    """Exchange two names in one system call, so that `old` always exists. Returns: False if this is not supported."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return bool(
        rename and rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0
    )  # some file systems cannot


def temporary_name(final: Path) -> Path:
    """Return where this process writes aside: beside `final`, with its id and a mark that no user would choose."""
    return final.with_name(f"{final.name}.tmp-{os.getpid()}-{place_of_processes()}")


@cache
def place_of_processes() -> str:
    """Return 16 hexadecimal digits of the machine or container within which a process id means one process.

    They stay the same when the machine starts again, so that what a power cut left is deleted.
    """
    parts = ["manyheads", socket.gethostname()]
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    with suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text(encoding="ascii", errors="replace"))
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]


def _discard(path: Path) -> None:
    """Delete a path if it exists. Errors are ignored: cleaning up must not hide the error that made it necessary."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _exchange(new: Path, old: Path) -> None:
    """Exchange two names by renaming: `old` is missing for a moment; after a crash there `remove_stale` restores it."""
    spare = temporary_name(old.with_name(f"{old.name}.old"))
    _discard(spare)
    old.rename(spare)
    try:
        new.rename(old)
    except OSError:
        spare.rename(old)
        raise
    spare.rename(new)
