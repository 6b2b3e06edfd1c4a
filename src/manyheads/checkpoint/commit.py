"""Writing so that a crash at any instant leaves either the old file or the new one, whole.

Order: write aside, fsync every file, manifest last, fsync the folder, rename, fsync the parent. A rename before
the fsyncs could survive a power cut that the contents do not.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manyheads.checkpoint.faults import check_free_space, saving
from manyheads.checkpoint.verify import MANIFEST, list_files, list_folders, make_manifest
from manyheads.data import folder as data_folder
from manyheads.data.folder import is_other_process, sync

__all__ = ["make_folder", "remove_folder", "remove_stale", "sync", "write_file", "write_folder", "write_text"]

_TEMPORARY = re.compile(r"(.+?)(\.old)?\.tmp-(\d+)")


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
        make_folder(final.parent)
        _discard(temporary)
        try:
            temporary.mkdir()
            write(temporary)
            for name in list_files(temporary):
                sync(temporary / name)
            for path in list_folders(temporary):
                sync(path)
            with (temporary / MANIFEST).open("w", encoding="utf-8", newline="\n") as file:
                file.write(make_manifest(temporary))
                file.flush()
                os.fsync(file.fileno())
            sync(temporary)
            if not os.path.lexists(final):  # a link that leads nowhere is replaced too
                temporary.rename(final)
            elif not data_folder.swap(temporary, final):
                _exchange(temporary, final)
            sync(final.parent)
        finally:
            _discard(temporary)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, so that a crash cannot take them away again under what is written in them."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.absolute().parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a parent that may be passed through but not opened
            sync(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a small text file in one step, durably.

    Raises: SaveError: it could not be written; an older file is as it was.
    """
    write_file(path, text.encode())


def write_file(path: Path, data: bytes) -> None:
    """The same of any small file."""
    temporary = _aside(path)
    with saving(path, len(data)):
        make_folder(path.parent)
        try:
            if os.path.lexists(temporary):
                _discard(temporary)
            with temporary.open("xb") as file:  # x: a link of this name is never written through
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(path.parent)
        finally:
            _discard(temporary)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that its final name goes first: a crash half-way leaves no half-empty folder under it."""
    temporary = _aside(folder)
    with saving(folder, 0):
        _discard(temporary)
        folder.rename(temporary)
        sync(folder.parent)
        _discard(temporary)


def remove_stale(parent: Path) -> list[str]:
    """Delete what dead processes (and failed saves of this one) left aside in `parent`.

    A folder that was cut off between the two renames of `_exchange` gets its name back instead.

    Returns: the names that were deleted.
    """
    removed = []
    for path in sorted(parent.glob("*.tmp-*")):
        match = _TEMPORARY.fullmatch(path.name)
        if not match or is_other_process(int(match[3])):
            continue
        if match[2] and not path.with_name(match[1]).exists():
            with suppress(OSError):
                path.rename(path.with_name(match[1]))
                continue
        _discard(path)
        removed.append(path.name)
    return removed


def _aside(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp-{os.getpid()}")


def _discard(path: Path) -> None:
    """Delete what may not be there; cleaning up must never hide the error that made it necessary."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _exchange(new: Path, old: Path) -> None:
    """Exchange two names by renaming: `old` is free for an instant, and `remove_stale` mends a crash there."""
    spare = old.with_name(f"{old.name}.old.tmp-{os.getpid()}")
    _discard(spare)
    old.rename(spare)
    try:
        new.rename(old)
    except OSError:
        spare.rename(old)
        raise
    spare.rename(new)
