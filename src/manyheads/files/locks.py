"""Locks between processes, so that two commands never write to the same place at the same time.

The system releases a lock when its process ends for any reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyheads.errors import ManyHeadsError
from manyheads.files.commit import is_other_process
from manyheads.files.faults import saving
from manyheads.files.safe_open import open_in_place

try:
    import fcntl
except ImportError:  # Windows: the process id is the only lock
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path, refusal: Callable[[str], ManyHeadsError]) -> Iterator[None]:
    """Hold a lock file within the block. It contains the id of this process, and is empty afterwards.

    Args:
        path: the lock file; it is created if it is missing.
        refusal: makes the error, from the id of the process that has the lock, or `unknown`.

    Raises: what `refusal` makes. SaveError: the lock file cannot be written.
    """
    with saving(path, 16):
        handle = open_in_place(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        owner = os.read(handle, 32).decode(errors="replace").strip()
        if not take(handle, owner) or not _is_named(handle, path):
            raise refusal(owner or "unknown")
        with saving(path, 16):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
        with suppress(OSError):  # the open file is the lock; the number is for messages
            os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def take(handle: int, owner: str = "") -> bool:
    """Lock an open file until it is closed.

    Args: owner: the id of the process that wrote into it, for systems without locks.

    Returns: False: another process has the lock.
    """
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks: use the process id
        else:
            return True
    return not owner.isdecimal() or not is_other_process(int(owner))


def _is_named(handle: int, path: Path) -> bool:
    """Return whether the open file still has its name: the process that had the lock may have deleted the folder."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
