"""Operating-system errors while saving, in one line: the path, the reason, the space that is needed and free."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from manyheads.errors import SaveError
from manyheads.files.safe_open import RefusedFileError

_REMEDIES = {
    errno.ENOSPC: "free some space or choose another folder",
    errno.EDQUOT: "free some of your quota or choose another folder",
    errno.EIO: "the disk or network drive is failing; choose another one",
    errno.EROFS: "the file system is mounted read-only; choose another folder",
    errno.EACCES: "change the permissions or choose another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or choose another folder",
}


def free_bytes(path: Path) -> int:
    """Return the number of free bytes where `path` is or will be; -1 if unknown."""
    for folder in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return -1


def check_free_space(path: Path, needed_bytes: int, *, also: str = "") -> None:
    """Check that there is enough space before writing begins.

    Args:
        path: the file or folder to write.
        needed_bytes: its size.
        also: another remedy.

    Raises: SaveError: fewer than `needed_bytes` are free where `path` is to be written.
    """
    free = free_bytes(path)
    if 0 <= free < needed_bytes:
        raise SaveError(_describe(path, errno.ENOSPC, os.strerror(errno.ENOSPC), needed_bytes) + also)


@contextmanager
def saving(path: Path, needed_bytes: int) -> Iterator[None]:
    """Convert every OSError of the block, also one that safetensors wraps, to a SaveError that names `path`."""
    try:
        yield
    except RefusedFileError as error:
        raise SaveError(f"Cannot save {path}: {error}.") from error
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise SaveError(_describe(path, code, os.strerror(code), needed_bytes)) from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise SaveError(_describe(path, error.errno or 0, reason, needed_bytes)) from error


def _describe(path: Path, code: int, reason: str, needed_bytes: int) -> str:
    free = free_bytes(path)
    space = f"{free} bytes are free" if free >= 0 else "free space unknown"
    space = f" ({needed_bytes} bytes are needed, {space})" if needed_bytes else f" ({space})"
    remedy = _REMEDIES.get(code, "check the folder, or choose another one")
    return f"Cannot save {path}: {reason}{space}. Older files are untouched; {remedy}."
