"""Writing so that a crash at any instant leaves either the old file or the new one, whole.

Order: write aside, fsync every file, manifest last, fsync the folder, rename, fsync the parent. A rename before
the fsyncs could survive a power cut that the contents do not.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manyheads.checkpoint.faults import check_free_space, saving
from manyheads.checkpoint.verify import MANIFEST, make_manifest

__all__ = ["remove_folder", "remove_stale", "write_folder", "write_text"]

_TEMPORARY = re.compile(r".+\.tmp-(\d+)")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_folder(final: Path, write: Callable[[Path], None], *, needed_bytes: int = 0) -> None:
    """Create (or replace) the folder `final` in one step, with a manifest.

    Args:
        final: the folder's final name; nothing incomplete is ever seen under it.
        write: fills the folder that it is given.
        needed_bytes: an estimate, compared with the free space before anything is written.

    Raises: SaveError: the disk is full, read-only, failing...; nothing is left behind, an older `final` is as it was.
    """
    temporary = _aside(final)
    with saving(final, needed_bytes):
        check_free_space(final.parent, needed_bytes)
        final.parent.mkdir(parents=True, exist_ok=True)
        _discard(temporary)
        try:
            temporary.mkdir()
            write(temporary)
            for path in sorted(temporary.rglob("*"), reverse=True):
                _sync(path)
            with (temporary / MANIFEST).open("w", encoding="utf-8", newline="\n") as file:
                file.write(make_manifest(temporary))
                file.flush()
                os.fsync(file.fileno())
            _sync(temporary)
            if final.exists():
                _exchange(temporary, final)
            else:
                temporary.rename(final)
            _sync(final.parent)
        finally:
            _discard(temporary)


def write_text(path: Path, text: str) -> None:
    """Replace a small text file in one step, durably.

    Raises: SaveError: it could not be written; an older file is as it was.
    """
    temporary = _aside(path)
    data = text.encode()
    with saving(path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync(path.parent)
        finally:
            _discard(temporary)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that its final name goes first: a crash half-way leaves no half-empty folder under it."""
    temporary = _aside(folder)
    with saving(folder, 0):
        _discard(temporary)
        folder.rename(temporary)
        _sync(folder.parent)
        _discard(temporary)


def remove_stale(parent: Path) -> list[str]:
    """Delete what dead processes (and failed saves of this one) left aside in `parent`.

    Returns: the names that were deleted.
    """
    removed = []
    for path in sorted(parent.glob("*.tmp-*")):
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _is_other_process(int(match[1])):
            _discard(path)
            removed.append(path.name)
    return removed


def _aside(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp-{os.getpid()}")


def _is_other_process(pid: int) -> bool:
    if pid == os.getpid():
        return False  # saves of one process follow one another, so this one is over
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot sync a directory
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(path: Path) -> None:
    """Delete what may not be there; cleaning up must never hide the error that made it necessary."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders' names, by one system call where there is one, so that `old` exists at every instant."""
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if rename and rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
            return
    # Elsewhere, and on file systems that cannot swap, the name is free for an instant; a crash there leaves it free.
    spare = old.with_name(f"{old.name}.old.tmp-{os.getpid()}")
    _discard(spare)
    old.rename(spare)
    try:
        new.rename(old)
    except OSError:
        spare.rename(old)
        raise
    spare.rename(new)
