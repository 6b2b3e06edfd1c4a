"""What the launcher says of this process, and how several processes become a group.

`torchrun` starts the same command once a rank and describes each one's place by environment variables. Nothing here
imports torch before a group is really started, so a command that runs alone pays nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.distributed.group import Group

__all__ = ["DEFAULT_TIMEOUT", "Place", "find_place", "start"]

DEFAULT_TIMEOUT = 120.0
"""Seconds without a sign of life after which a rank counts as lost."""


_VARIABLES = {
    "rank": "RANK",
    "world": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "restarts": "TORCHELASTIC_RESTART_COUNT",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process among several.

    Attributes:
        rank: of this process, from 0.
        world: how many there are.
        local_rank: among those of this machine; the number of its GPU.
        restarts: how often the launcher began again.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    restarts: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes, prints and logs."""
        return self.rank == 0


def find_place(environment: Mapping[str, str] | None = None) -> Place:
    """This process's place as torchrun sets it; alone without a launcher.

    Args: environment: None takes the process's own.

    Raises: ConfigError: the variables contradict each other, or are no numbers.
    """
    values = os.environ if environment is None else environment
    if "WORLD_SIZE" not in values or "RANK" not in values:
        return Place()
    names = {
        "rank": "RANK",
        "world": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "restarts": "TORCHELASTIC_RESTART_COUNT",
    }
    numbers = {}
    for field, name in names.items():
        text = values.get(name, "0")
        if not text.isdecimal():
            raise ConfigError(f"{name} is {text!r} in the environment; it must be a whole number, as torchrun sets it.")
        numbers[field] = int(text)
    place = Place(**numbers)
    if not place.rank < place.world:
        raise ConfigError(
            f"RANK is {place.rank} and WORLD_SIZE {place.world} in the environment; ranks count from 0 and stay below"
            " the world's size. Start with torchrun, which sets both."
        )
    return place


def start(place: Place, device: str = "cpu", timeout: float = DEFAULT_TIMEOUT) -> Group:
    """The group that this process belongs to; a group of one where it is alone.

    Args:
        place: of this process.
        device: `cuda` makes tensors travel by NCCL, anything else by gloo.
        timeout: seconds without a sign of life after which a rank is lost, and the others end.

    Raises: ConfigError: the timeout is not above 0. RankLostError: the others cannot be reached.
    """
    if not timeout > 0:
        raise ConfigError(f"--timeout is {timeout}; it must be above 0 seconds.")
    from manyheads.distributed.group import Group, connect

    return Group() if place.world == 1 else connect(place, device, timeout)
