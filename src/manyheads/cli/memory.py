"""Keeping memory that torch will ask for again in a moment.

A training step frees and asks for the same tensors of many megabytes over and over. glibc hands each such block back to
the system at once, and gets it again as pages of zeros, each with a page fault: measured on two cores, that costs more
than a quarter of a run. So glibc is told to keep them.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_big_blocks"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**31 - 1
_MAPPED_BYTES = 2**30


def keep_big_blocks() -> bool:
    """Ask glibc to keep freed blocks; to be called before torch is imported.

    Returns: whether it was done; elsewhere than on Linux with glibc nothing is changed.
    """
    if sys.platform != "linux":
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  (musl has mallopt too, but means nothing by it)
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all([mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES), mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)])
