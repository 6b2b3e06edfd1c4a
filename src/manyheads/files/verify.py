"""JSON: reading of files that hold one object, of possibly external origin, and writing of records for programs.

The manifest of a folder: SHA-256 and size of every file, checked before a file of the folder is used.

safetensors detects truncated files but not flipped bits, so integrity is checked here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from manyheads.errors import CheckpointError, ModelFileError
from manyheads.files.safe_open import RefusedFileError, open_regular, read_limited

MOST_BYTES = 16 << 20


def read_object(file: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the content of a JSON file.

    Args: most_bytes: a larger file is refused before it is read.

    Raises: FileNotFoundError: there is no file. ModelFileError: it cannot be read, is too large, is not one object, or
        has half a surrogate pair, which no file in UTF-8 can hold.
    """
    try:
        text = read_limited(file, most_bytes).decode("utf-8")
        values = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # an escape of a surrogate, perhaps of a whole pair
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except FileNotFoundError:
        raise
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise ModelFileError(
            f"{file} cannot be read as JSON: a text in it has half a surrogate pair, {half}."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{file} must hold one JSON object, not a {type(values).__name__}.")
    return values


def json_text(record: Any, indent: int | None = None) -> str:
    """Return a record as JSON. NaN and infinity, which JSON does not have, become null."""
    try:
        return json.dumps(record, ensure_ascii=False, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(record), ensure_ascii=False, indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 16 << 20
READ = (".safetensors", ".json", ".spm", ".md")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(folder: Path) -> list[str]:
    """Return every file below `folder` except its manifest, as sorted relative names with forward slashes.

    Hidden files are left out: file managers and network drives create some in any folder, and nothing here reads them.

    Raises: OSError: a folder cannot be listed (which is not the same as empty).
    """
    names = []
    for place, folders, files in _walk(folder):
        links = [name for name in folders if (place / name).is_symlink()]
        names += [(place / name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(name for name in names if name != MANIFEST)


def list_folders(folder: Path) -> list[Path]:
    """Return every folder below `folder`, the deepest first."""
    return sorted((place for place, _, _ in _walk(folder) if place != folder), reverse=True)


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    def refuse(error: OSError) -> NoReturn:
        raise error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "."]
        yield Path(place), folders, [name for name in files if name[0] != "."]


def make_manifest(folder: Path, known: Mapping[str, str] | None = None) -> str:
    """Return the manifest's text for the present files of `folder`.

    Args: known: SHA-256 of files whose writer computed it on the way; the other files are read.
    """
    files = {
        name: {"sha256": (known or {}).get(name) or file_sha256(folder / name), "size": (folder / name).stat().st_size}
        for name in list_files(folder)
    }
    return render_manifest(files)


def render_manifest(files: dict[str, dict[str, Any]]) -> str:
    """Return the manifest's text for these files: name -> sha256 and size."""
    return json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1, sort_keys=True) + "\n"


def verify_folder(folder: Path, *, strict: bool = True) -> None:
    """Check every file of `folder` against its manifest.

    Args:
        folder: a checkpoint or a model folder.
        strict: also refuse every file that the manifest does not list, and symbolic links (which a download cache
            creates); otherwise refuse only unlisted files of the kinds that are read from model folders.

    Raises: CheckpointError: the message names the folder, the first wrong file and the reason.
    """
    try:
        if strict and (folder / MANIFEST).is_symlink():
            raise CheckpointError(f"{folder} is refused: {MANIFEST} is a symbolic link.")
        files = read_manifest(folder)
        present = set(list_files(folder))
        for name, entry in files.items():
            if name not in present:
                raise CheckpointError(f"{folder} is damaged: {name} is missing.")
            _verify_file(folder, name, entry, strict)
        extra = sorted(name for name in present - files.keys() if strict or name.endswith(READ))
        if extra:
            raise CheckpointError(
                f"{folder} is damaged: {extra[0]} is not in its manifest; remove it or the whole folder."
            )
    except OSError as error:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} does not exist (any more).") from error
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error} ({error.filename}).") from error


def unlisted_files(folder: Path) -> list[str]:
    """Return the files of a folder that its manifest does not list, which a replacement would delete.

    Raises: CheckpointError: it has no manifest, or a damaged one. OSError: a folder cannot be listed.
    """
    known = read_manifest(folder)
    return [name for name in list_files(folder) if name not in known]


def is_intact(folder: Path) -> bool:
    """Return whether `verify_folder` finds no error."""
    try:
        verify_folder(folder)
    except CheckpointError:
        return False
    return True


def _verify_file(folder: Path, name: str, entry: dict[str, Any], strict: bool) -> None:
    path = folder / name
    if strict and path.is_symlink():
        raise CheckpointError(f"{folder} is refused: {name} is a symbolic link.")
    if not path.is_file():  # a pipe or a device would be read forever
        raise CheckpointError(f"{folder} is refused: {name} is not a regular file.")
    size = path.stat().st_size
    if size != entry["size"]:
        raise CheckpointError(f"{folder} is damaged: {name} has {size} bytes, its manifest says {entry['size']}.")
    if file_sha256(path) != entry["sha256"]:
        raise CheckpointError(f"{folder} is damaged: the contents of {name} differ from their SHA-256 in the manifest.")


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size and SHA-256 of each file of a folder, as its manifest records them.

    Raises: CheckpointError: there is no manifest, or it is damaged or of another version.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist.")
    try:
        text = read_limited(path, _MOST_MANIFEST_BYTES)
        manifest = json.loads(text)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is incomplete: it has no {MANIFEST}.") from error
    except RefusedFileError as error:
        raise CheckpointError(f"{path} is refused: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} is not JSON ({error}).") from error
    if not isinstance(manifest, dict) or manifest.keys() != {"format_version", "files"}:
        raise CheckpointError(
            f"{folder} is damaged: {MANIFEST} must hold 'format_version' and 'files' and nothing else."
        )
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format version {version!r}, this program reads {FORMAT_VERSION};"
            " use the manyheads that wrote it."
        )
    files = manifest["files"]
    if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise CheckpointError(
            f"{folder} is damaged: {MANIFEST} has an entry that is not a plain name with sha256 and size."
        )
    if text != render_manifest(files).encode():  # equivalent JSON is not enough
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} was changed after it was written.")
    return files


def _is_entry(name: str, entry: object) -> bool:
    path = PurePosixPath(name)
    plain = bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
    return plain and isinstance(entry, dict) and entry.keys() == {"sha256", "size"} and type(entry["size"]) is int
