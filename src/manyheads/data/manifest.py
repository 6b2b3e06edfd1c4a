"""The manifest of a folder of data: the settings it was made with, and the size and SHA-256 of every file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from manyheads.errors import DataError
from manyheads.files.commit import remove_stale, write_folder
from manyheads.files.safe_open import read_limited
from manyheads.files.verify import MANIFEST, file_sha256

MAX_MANIFEST_BYTES = 4 * 2**20
SELF_VOUCHING = 2  # the first format_version whose manifests contain their own SHA-256
READ = (".json", ".bin", ".txt")  # the kinds of files that are read from a folder of data


def write_data(final: Path, write: Callable[[Path], dict[str, Any]], *, replace: bool = False) -> dict[str, Any]:
    """Create a folder of data in one step; see `files.commit.write_folder`.

    Args:
        final: the folder's final name; its parents are made.
        write: fills the folder that it is given, and returns the content of the manifest.
        replace: replace an older folder of that name.

    Returns: the manifest.
    Raises:
        DataError: `final` exists and `replace` is off.
        SaveError: the folder could not be written; nothing is left behind, and an older folder is as it was.
    """
    remove_stale(final.absolute().parent, final.name)  # before the check, because it can bring an older folder back
    if not replace and os.path.lexists(final):
        raise DataError(f"{final} exists already; choose another folder, remove it, or ask for it to be replaced.")
    manifest: dict[str, Any] = {}

    def fill(folder: Path) -> None:
        manifest.update(write(folder))
        write_manifest(folder, manifest)

    write_folder(final, fill, manifest=False, replace=replace)
    return manifest


def file_record(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file, for a manifest."""
    return {"sha256": file_sha256(path), "size": path.stat().st_size}


def verify_file(path: Path, record: Any, *, content: bool = True) -> None:
    """Compare a file with its record. content: compare the SHA-256 too, not only the size.

    Raises: DataError: the file is missing, or differs.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"The manifest of {path.parent} does not list {path.name}; the folder is damaged. Prepare the data again."
        )
    try:
        if not path.is_file() or path.stat().st_size != record.get("size"):
            found = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
            raise DataError(f"{path} {found}, but its manifest says {record.get('size')}. Prepare the data again.")
        if content and file_sha256(path) != record.get("sha256"):
            raise DataError(f"{path} is damaged: its SHA-256 differs from the manifest. Prepare the data again.")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from None


def refuse_strangers(folder: Path, known: Collection[str]) -> None:
    """Refuse files that have a name of the kind that is read but are not in the manifest.

    Args: known: names in the manifest.

    Raises: DataError: there is such a file, or the folder cannot be listed.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise DataError(f"Cannot read {folder}: {error.strerror or error}.") from None
    strange = [name for name in names if name.endswith(READ) and name[0] != "." and name not in (*known, MANIFEST)]
    if strange:
        raise DataError(
            f"{folder} holds {strange[0]}, which its manifest does not list. Remove it, or prepare the data again."
        )


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write manifest.json, with its own SHA-256 under `sha256`."""
    content["sha256"] = _own_digest(content)
    (folder / MANIFEST).write_bytes(_render(content))


def _own_digest(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its entry `sha256`."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _render(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path, *, kind: str, version: int) -> dict[str, Any]:
    """Return the manifest of a folder.

    Args:
        folder: the folder.
        kind: the required `format`.
        version: the newest `format_version` that this code reads.

    Raises: DataError: the manifest is missing, damaged, of another kind or of a newer version.
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
    try:
        is_own = content.get("sha256") == own and raw == _render(content)
    except UnicodeEncodeError:  # an escape of half a surrogate pair
        is_own = False
    if not is_own:
        raise DataError(f"{path} was changed after it was written. Prepare the data again.")
    return content
