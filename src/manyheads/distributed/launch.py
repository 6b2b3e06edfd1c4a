"""Start of the process group to which this process belongs.

This file imports torch only when a group is started, so that a command in a single process starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.distributed.group import Group
    from manyheads.distributed.process import Process

DEFAULT_TIMEOUT = 120.0
"""Seconds without a sign of life after which a rank counts as lost."""


def start(process: Process, device: str = "cpu", timeout: float = DEFAULT_TIMEOUT) -> Group:
    """Return the group of this process; a group of one for a single process.

    Args:
        process: rank and world size of this process.
        device: `cuda`: tensors are exchanged with NCCL; otherwise with gloo.
        timeout: seconds without a heartbeat after which a rank is lost and the others end.

    Raises: ConfigError: the timeout is not above 0. RankLostError: the others cannot be reached.
    """
    if not timeout > 0:
        raise ConfigError(f"--timeout is {timeout}; it must be above 0 seconds.")
    from manyheads.distributed.group import Group, connect

    return Group() if process.world == 1 else connect(process, device, timeout)
