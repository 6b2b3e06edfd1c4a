"""Writing a folder of data files so that it is there whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from manyheads.errors import DataError, SaveError
from manyheads.files.guarded import read_limited

__all__ = [
    "clear_leftovers",
    "file_record",
    "is_other_process",
    "read_manifest",
    "refuse_strangers",
    "swap",
    "sync",
    "verify_file",
    "write_aside",
    "write_manifest",
]

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 * 2**20
HASH_BLOCK_BYTES = 2**20
SELF_VOUCHING = 2  # the first format_version whose manifests hold their own SHA-256
READ = (".json", ".bin", ".txt")
AT_FDCWD = -100
RENAME_EXCHANGE = 2
ASIDE = re.compile(r"(\.old)?\.tmp-(\d+)")


def write_aside(final: Path, write: Callable[[Path], None], *, replace: bool = False) -> None:
    """Let `write` fill a new folder beside `final`, make it durable, and rename it into place.

    Args:
        final: the folder to come; its parents are made.
        write: fills the empty folder that it is given.
        replace: an older folder of that name is exchanged for the new one, and removed then.

    Raises:
        DataError: `final` exists and `replace` is off.
        SaveError: the disk is full or refuses; nothing is left behind, and an older folder is untouched.
    """
    clear_leftovers(final)
    if not replace and final.exists():
        raise DataError(f"{final} exists already; choose another folder, remove it, or ask for it to be replaced.")
    aside = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    old = final.with_name(f"{final.name}.old.tmp-{os.getpid()}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write(aside)
        for path in [*(path for path in aside.rglob("*") if path.is_dir()), aside]:
            sync(path)
        if not final.exists():
            aside.rename(final)
        elif not swap(aside, final):
            _exchange(aside, final, old)
        sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise SaveError(_message(final, error)) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def swap(new: Path, old: Path) -> bool:
    """Exchange two names by one system call, so that `old` exists at every instant. Returns: False if there is none."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return bool(
        rename and rename(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0
    )  # some file systems cannot


def _exchange(aside: Path, final: Path, old: Path) -> None:
    """The same by two renames: `final` is free for an instant, and `clear_leftovers` mends a crash there."""
    final.rename(old)
    try:
        aside.rename(final)
    except OSError:
        with suppress(OSError):  # what cannot be put back now is put back by `clear_leftovers`
            old.rename(final)
        raise


def clear_leftovers(final: Path) -> None:
    """Delete what killed processes left beside `final`; put back an older folder that one of them had put aside."""
    try:
        beside = sorted(final.absolute().parent.iterdir())
    except OSError:
        return
    for path in beside:
        match = ASIDE.fullmatch(path.name, len(final.name)) if path.name.startswith(final.name) else None
        if match is None or is_other_process(int(match[2])) or path.is_symlink():
            continue
        if match[1] and not final.exists():
            with suppress(OSError):
                path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def is_other_process(pid: int) -> bool:
    """Whether another process of that number is there, as far as can be known.

    One that is not has left behind what bears its number; so has this one, whose writes follow one another.
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


def _message(final: Path, error: OSError) -> str:
    free = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = next(parent for parent in final.absolute().parents if parent.exists())
        free = f" {shutil.disk_usage(place).free} bytes are free on that disk; make room or choose another place."
    return f"Cannot write {final}: {error.strerror or error}.{free}"


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_record(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, for a manifest."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return {"sha256": digest.hexdigest(), "size": size}


def verify_file(path: Path, record: Any, *, content: bool = True) -> None:
    """Compare a file with its record; `content` off compares the size alone.

    Raises: DataError: it is missing, or differs.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"The manifest beside {path} has no record of it; the folder is damaged. Prepare the data again."
        )
    try:
        if not path.is_file() or path.stat().st_size != record.get("size"):
            found = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
            raise DataError(f"{path} {found}, but its manifest says {record.get('size')}. Prepare the data again.")
        if content and file_record(path)["sha256"] != record.get("sha256"):
            raise DataError(f"{path} is damaged: its SHA-256 is not the one in its manifest. Prepare the data again.")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from None


def refuse_strangers(folder: Path, known: Collection[str]) -> None:
    """Refuse files of the kinds that are read from such folders but that no manifest vouches for.

    Raises: DataError: there is one, or the folder cannot be listed.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise DataError(f"Cannot read {folder}: {error.strerror or error}.") from None
    strange = [name for name in names if name.endswith(READ) and name[0] != "." and name not in (*known, MANIFEST)]
    if strange:
        raise DataError(
            f"{folder} holds {strange[0]}, which its manifest does not know. Remove it, or prepare the data again."
        )


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write manifest.json, which vouches for itself too, and make it durable; to be called after every other file."""
    path = folder / MANIFEST
    content["sha256"] = _own_digest(content)
    path.write_bytes(_render(content))
    for name in content["files"]:
        sync(folder / name)
    sync(path)


def _own_digest(content: dict[str, Any]) -> str:
    """SHA-256 of a manifest without the entry that holds it."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _render(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path, *, kind: str, version: int) -> dict[str, Any]:
    """The manifest of a folder.

    Args:
        kind: what its `format` must be.
        version: the newest `format_version` this code reads.

    Raises: DataError: it is missing, damaged, of another kind or of a newer version.
    """
    path = folder / MANIFEST
    try:
        raw = read_limited(path, MAX_MANIFEST_BYTES)
        content = json.loads(raw.decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} is not a folder written by manyheads: there is no {MANIFEST} in it.") from None
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}. Prepare the data again.") from None
    if not isinstance(content, dict) or content.get("format") != kind:
        raise DataError(f"{path} does not describe {kind}; is this the right folder?")
    found = content.get("format_version")
    if type(found) is not int or not 1 <= found <= version:
        raise DataError(f"{path} has format_version {found!r}; this program reads up to {version}. Update manyheads.")
    if not isinstance(content.get("files"), dict):
        raise DataError(f"{path} lists no files; it is damaged. Prepare the data again.")
    own = _own_digest(content) if found >= SELF_VOUCHING else None
    if content.get("sha256") != own or raw != _render(content):
        raise DataError(f"{path} was changed after it was written. Prepare the data again.")
    return content
