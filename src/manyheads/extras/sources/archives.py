"""Unpacking of archives that were fetched: zip and tar, into a folder beside them, within limits."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from manyheads.data.lines import Progress, phase_progress
from manyheads.errors import DataError
from manyheads.files.commit import check_free_space, write_folder
from manyheads.files.safe_open import open_regular

ZIP, TARS = ".zip", (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
EXPANSION, SPARE_BYTES = 40, 64 * 2**20
"""Text becomes ten times smaller at most; an archive that expands to more than this is made to fill a disk."""
MOST_FILES = 10_000
UNPACKED = ".files"


def is_archive(path: Path) -> bool:
    """Tell whether a file's name is that of an archive."""
    return path.name.lower().endswith((ZIP, *TARS))


def unpack(path: Path, progress: Progress) -> Path:
    """Return the folder of an archive's files, which is made if it is not there.

    Raises: DataError: the archive is damaged, has a link or a place outside, or expands beyond its limit. SaveError:
        there is too little space.
    """
    folder = path.with_name(f"{path.name}{UNPACKED}")
    if folder.is_dir():
        return folder
    most = path.stat().st_size * EXPANSION + SPARE_BYTES
    on_progress = phase_progress(progress, f"unpacking {path.name}", 0)

    def write(aside: Path) -> None:
        done = 0
        for count, (name, size, content) in enumerate(_members(path), 1):
            if done + size > most or count > MOST_FILES:
                raise DataError(
                    f"{path.name} expands to more than {most:,} bytes or {MOST_FILES:,} files, {EXPANSION} times its"
                    " size; it is left as it is. If it is right, unpack it yourself and give the folder to --from."
                )
            check_free_space(aside, size)
            place = aside / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as file:
                while block := content.read(2**20):
                    done += len(block)
                    if done > most:
                        raise DataError(f"{path.name} expands to more than {most:,} bytes, {EXPANSION} times its size.")
                    file.write(block)
                    on_progress(done)

    try:
        write_folder(folder, write, replace=True)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path.name} is not an intact archive: {error}. Remove {path} to fetch it again.") from error
    return folder


def _members(path: Path) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    """Yield name, size and content of each file. Raises: DataError: one is no file, or lies outside."""
    with open_regular(path) as file:
        if path.name.lower().endswith(ZIP):
            with zipfile.ZipFile(file) as archive:
                for member in archive.infolist():
                    if member.is_dir():
                        continue
                    if (member.external_attr >> 16) & 0o170000 not in (0, 0o100000):
                        raise DataError(f"{path.name} has {member.filename}, which is a link or a device, not a file.")
                    with archive.open(member) as content:
                        yield _safe(member.filename, path), member.file_size, content
            return
        with tarfile.open(fileobj=file, mode="r|*") as archive:
            for entry in archive:
                if entry.isdir():
                    continue
                unpacked = archive.extractfile(entry) if entry.isreg() else None
                if unpacked is None:
                    raise DataError(f"{path.name} has {entry.name}, which is a link or a device, not a file.")
                yield _safe(entry.name, path), entry.size, unpacked


def _safe(name: str, archive: Path) -> PurePosixPath:
    """Raises: DataError: a name leads out of the folder."""
    place = PurePosixPath(name)
    parts = [part for part in place.parts if part != "."]
    if place.is_absolute() or ".." in parts or not parts or any(mark in name for mark in ("\\", "\0", ":")):
        raise DataError(f"{archive.name} has the file {name!r}, whose place is outside of the folder of the archive.")
    return PurePosixPath(*parts)
