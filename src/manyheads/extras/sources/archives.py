"""Unpacking of archives that were fetched: zip and tar, into a folder beside them, within limits."""

from __future__ import annotations

import errno
import json
import lzma
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
from manyheads.files.verify import MANIFEST, read_object

ZIP, TARS = ".zip", (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
EXPANSION, SPARE_BYTES = 40, 64 * 2**20
"""Text becomes ten times smaller at most; an archive that expands to more than this is made to fill a disk."""
MOST_FILES = 10_000
UNPACKED = ".files"
_RECORD = ".archive.json"
"""In the folder: size and time of the archive, so that another archive of the same name is unpacked again."""
_DAMAGES = (
    *(zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError),
    *(NotImplementedError, RuntimeError, ValueError, TypeError, OSError),
)
"""What zipfile and tarfile raise: of bzip2 an OSError, of a name that is not UTF-8 a ValueError."""


def is_archive(path: Path) -> bool:
    """Tell whether a file's name is that of an archive."""
    return path.name.lower().endswith((ZIP, *TARS))


def unpack(path: Path, progress: Progress) -> Path:
    """Return the folder of an archive's files, which is made if it is not there, or is that of another archive.

    Raises: DataError: the archive is damaged, has a link, a place outside or a name twice, or expands beyond its limit;
        or a folder that is not ours has the name. SaveError: there is too little space.
    """
    folder = path.with_name(f"{path.name}{UNPACKED}")
    status = path.stat()
    record = {"size": status.st_size, "time": status.st_mtime_ns}
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MANIFEST).is_file():
            raise DataError(f"{path} is unpacked into {folder}, which holds something else; move one of them away.")
        if (folder / _RECORD).is_file() and read_object(folder / _RECORD) == record:
            return folder
    most = status.st_size * EXPANSION + SPARE_BYTES
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
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                file = place.open("xb")
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise DataError(f"{path.name} has {name} twice, or as a file and a folder.") from None
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                raise DataError(f"{path.name} has a file whose name is too long for this disk.") from None
            with file:
                while block := _read(content, path):
                    done += len(block)
                    if done > most:
                        raise DataError(f"{path.name} expands to more than {most:,} bytes, {EXPANSION} times its size.")
                    file.write(block)
                    on_progress(done)
        (aside / _RECORD).write_text(json.dumps(record), encoding="utf-8")

    write_folder(folder, write, replace=True)
    return folder


def _read(content: IO[bytes], path: Path) -> bytes:
    """Return the next bytes of a member. Raises: DataError: they are damaged."""
    try:
        return content.read(2**20)
    except _DAMAGES as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> DataError:
    return DataError(f"{path.name} is not an intact archive: {error}. Copy it again; if it was fetched, remove {path}.")


def _members(path: Path) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    """Yield name, size and content of each file. Raises: DataError: one is no file, or lies outside; or a damage."""
    try:
        with open_regular(path) as file:
            yield from _zip_members(path, file) if path.name.lower().endswith(ZIP) else _tar_members(path, file)
    except _DAMAGES as error:
        raise _damaged(path, error) from error


def _zip_members(path: Path, file: IO[bytes]) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.endswith("/"):
                continue
            if (member.external_attr >> 16) & 0o170000 not in (0, 0o100000):
                raise DataError(f"{path.name} has {member.filename}, which is a link or a device, not a file.")
            with archive.open(member) as content:
                yield _safe(member.filename, path), member.file_size, content


def _tar_members(path: Path, file: IO[bytes]) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
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
