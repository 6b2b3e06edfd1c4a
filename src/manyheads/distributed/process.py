"""Rank and world size of this process, from the environment variables that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from manyheads.errors import ConfigError

_VARIABLES = {
    "rank": "RANK",
    "world": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "restarts": "TORCHELASTIC_RESTART_COUNT",
}


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process among several.

    Attributes:
        rank: rank of this process, from 0.
        world: number of processes.
        local_rank: rank among the processes of this machine; the number of its GPU.
        restarts: number of restarts by the launcher.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    restarts: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes, prints and logs."""
        return self.rank == 0


def this_process(environment: Mapping[str, str] | None = None) -> Process:
    """Return the rank of this process as set by torchrun; a single process without a launcher.

    Args: environment: None: the process's environment.

    Raises: ConfigError: the variables contradict each other or are not numbers.
    """
    values = os.environ if environment is None else environment
    if "WORLD_SIZE" not in values or "RANK" not in values:
        return Process()
    numbers = {}
    for field, name in _VARIABLES.items():
        text = values.get(name, "0")
        if not text.isdecimal():
            raise ConfigError(f"{name} is {text!r} in the environment; it must be a whole number, as torchrun sets it.")
        numbers[field] = int(text)
    process = Process(**numbers)
    if not process.rank < process.world:
        raise ConfigError(
            f"RANK is {process.rank} and WORLD_SIZE {process.world} in the environment; ranks count from 0 and stay"
            " below the world's size. Start with torchrun, which sets both."
        )
    return process


def refuse_ranks(what: str) -> None:
    """Raises: ConfigError: this process is one of several, which `what` cannot use."""
    world = this_process().world
    if world > 1:
        raise ConfigError(f"{what} runs in one process, and torchrun started {world}; start it without torchrun.")


def local_device(name: str) -> str:
    """The device of that name for this rank: of several GPUs, each rank of a machine has its own."""
    process = this_process()
    if process.world == 1 or name not in ("auto", "cuda"):
        return name
    import torch

    return f"cuda:{process.local_rank}" if torch.cuda.is_available() else name
