"""Outputs never change a folder whose manifest lists its files: a model, a checkpoint, prepared data.

The reader of such a folder refuses a file that the manifest does not list, if it has the kind of a file that is read
there. So an output that would damage a folder in this way is refused before the work begins.

Locks between processes, so that two commands never write to the same place at the same time.

The system releases a lock when its process ends for any reason. Where it has no locks, the lock file tells which
process wrote it: its id, when it began, and its machine.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyheads.errors import ConfigError, ManyHeadsError
from manyheads.files.commit import is_other_process, place_of_processes, saving
from manyheads.files.safe_open import open_in_place, read_limited
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


try:
    import fcntl
except ImportError:  # Windows: the process id is the only lock
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path, refusal: Callable[[str], ManyHeadsError]) -> Iterator[None]:
    """Hold a lock file within the block. It names this process, and is empty afterwards.

    Args:
        path: the lock file; it is created if it is missing.
        refusal: makes the error, from the id of the process that has the lock and what is not known of it, or
            `unknown`.

    Raises: what `refusal` makes. SaveError: the lock file cannot be written.
    """
    with saving(path, 16):
        handle = open_in_place(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        owner = holder(handle, os.read(handle, 500).decode(errors="replace"), path)
        if owner or not _is_named(handle, path):
            raise refusal(owner or "unknown")
        with saving(path, 16):
            own = f"{os.getpid()} {began_at(os.getpid()) or '-'} {place_of_processes()} {socket.gethostname()}\n"
            os.ftruncate(handle, 0)
            os.pwrite(handle, own.encode(), 0)
        yield
        with suppress(OSError):  # the open file is the lock; its content is for messages and for systems without locks
            os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def take(handle: int) -> bool:
    """Lock an open file until it is closed. Returns: False: another process has the lock."""
    return not holder(handle, "", Path())


def holder(handle: int, content: str, path: Path) -> str:
    """Lock an open file until it is closed.

    Args: content: of the lock file, which tells who wrote it, for systems without locks. path: of the lock file.

    Returns: empty, or the id of the process that has the lock, with what is not known of it.
    """
    pid, began, place, host = (*content.split(), "", "", "", "")[:4]
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return pid or "unknown"
        except OSError:
            pass  # a file system without locks
        else:
            return ""
    if not pid.isdecimal():
        return ""
    if place and place != place_of_processes():
        return f"{pid} of {host or 'another machine'}, which is not seen from here (if it has ended, remove {path})"
    if not is_other_process(int(pid)):
        return ""
    now = began_at(int(pid))
    if began.isdecimal() and now is not None:
        return pid if began == now else ""  # an id is given again to another program
    return f"{pid} (if that is another program by now, remove {path})"


def began_at(pid: int) -> str | None:
    """Return when a process began, in ticks since the machine did, or None where the system does not tell."""
    try:
        content = read_limited(Path(f"/proc/{pid}/stat"), 10_000).decode(errors="replace")
        return content.rpartition(")")[2].split()[19]  # field 22 of proc(5), behind a name in brackets
    except (OSError, IndexError):
        return None


def _is_named(handle: int, path: Path) -> bool:
    """Return whether the open file still has its name: the process that had the lock may have deleted the folder."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
