"""Settings of a CPU for torch: freed memory is kept, and waiting threads do not occupy a core for long.

Memory: every training step frees and allocates the same large tensors. By default glibc returns each such block to the
system at once and gets it again as pages of zeros, each with a page fault. So glibc is told to keep freed blocks, and
torch to use pages of 2 MiB. Measured over 120 steps of the demo's model in bf16, one thread, torch 2.13 and glibc
2.36: 31,600 page faults a step as it comes, 3,700 with blocks kept, 2,000 with large pages too.

Blocks of 256 MiB and more are returned all the same: kept ones of many sizes leave gaps. Of the preset `million` only
tensors of a whole sequence are that large; on one sequence of 32,768 tokens, with limits in proportion, the peak of a
step is a quarter lower than with a limit of 1 GiB. A step of the demo has no such block.

Threads: OpenMP's threads spin between two operations, for some milliseconds by default. This is fastest if every thread
has a core. If another program is busy, a spinning thread takes the core that the thread it waits for needs, and
a step of 0.2 s took 12 s (two cores, two threads). Spinning a thirtieth as long costs nothing on a free machine, a
hundredth as long costs a fifth of the speed there, and is the better on a busy one. See docs/decisions/004.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**31 - 1
_MAPPED_BYTES = 2**28
_LARGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")  # read by torch when it is first used, as the next by OpenMP
_SPINS = "GOMP_SPINCOUNT"
_FREE_SPINS, _BUSY_SPINS = "10000", "3000"


def set_up_machine() -> bool:
    """Apply these settings. Call it before torch is imported. Variables that the user has set are not changed.

    Returns: whether glibc keeps blocks now; False elsewhere than on Linux with glibc.
    """
    if sys.platform != "linux":
        return False
    os.environ.setdefault(*_LARGE_PAGES)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(_SPINS, _BUSY_SPINS if _is_busy() else _FREE_SPINS)
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version  # musl has a mallopt too, which does nothing
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all([mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES), mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)])


def _is_busy() -> bool:
    """Return whether other processes are computing in each of three checks within milliseconds."""
    for _ in range(3):
        try:
            running = int(Path("/proc/loadavg").read_text("ascii").split()[3].split("/")[0])
        except (OSError, ValueError, IndexError):
            return True
        if running <= 1:  # this process itself
            return False
        time.sleep(0.001)
    return True
