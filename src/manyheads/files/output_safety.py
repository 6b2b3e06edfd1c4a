"""Outputs never change a folder whose manifest lists its files: a model, a checkpoint, prepared data.

The reader of such a folder refuses a file that the manifest does not list, if it has the kind of a file that is read
there. So an output that would damage a folder in this way is refused before the work begins.
"""

from __future__ import annotations

import json
from pathlib import Path

from manyheads.errors import ConfigError
from manyheads.files.safe_open import read_limited
from manyheads.files.verify import MANIFEST, READ

_READ_FROM_DATA = (".json", ".bin", ".txt")
_MOST_BYTES = 16 << 20


def check_spares_folders(output: Path, *, is_folder: bool = False) -> None:
    """Check that an output does not damage a folder with a manifest.

    Args:
        output: the file or folder to be written.
        is_folder: it is a folder, with files of all kinds.

    Raises: ConfigError: it would be one of the files that a manifest lists, or one that makes its folder unusable.
    """
    try:
        place = output.parent.resolve() / output.name if is_folder else output.resolve()
    except (OSError, ValueError, RuntimeError):  # no path, or links in a circle; writing reports it
        return
    for folder in place.parents:
        name = place.relative_to(folder).as_posix()
        if any(part[0] == "." for part in name.split("/")):
            return  # hidden files belong to no folder
        listed, is_data = _listed_files(folder)
        if listed is None:
            continue
        if name in listed or name == MANIFEST:
            raise ConfigError(f"{output} is a file of {folder}, as its {MANIFEST} says; choose another place.")
        if is_data:
            is_read = not is_folder and "/" not in name and name.endswith(_READ_FROM_DATA)
        else:
            is_read = is_folder or name.endswith(READ)
        if is_read:
            raise ConfigError(
                f"{output} would be in {folder}, which would then be refused as damaged, because its {MANIFEST} does"
                " not list it; choose another place."
            )


def _listed_files(folder: Path) -> tuple[set[str] | None, bool]:
    """Return the names in a folder's manifest, and whether it is of data; None: it has no manifest of ours."""
    try:
        manifest = json.loads(read_limited(folder / MANIFEST, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None, False
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or "format_version" not in manifest:
        return None, False
    return set(files), "format" in manifest
