"""`--fit`: the largest step that fits into memory, extrapolated from short steps.

Memory is linear in the rows of a step and polynomial in its length (see `memory`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from manyheads.errors import ConfigError
from manyheads.training.plan.memory import continued
from manyheads.training.settings import RunConfig

__all__ = ["LONGEST", "Fit", "along", "describe_fits", "free_bytes", "largest"]

SHARE = 0.9
"""Of what is free: a prediction is good to some percent, and a machine is never alone."""

LONGEST = 1 << 24
MIB = 2**20


@dataclass(frozen=True)
class Fit:
    """The largest value of a setting.

    now: the value in the config. given: a description of the settings on which it depends. predicted_bytes: peak memory
    of
    the process.
    """

    setting: str
    value: int
    now: int
    given: str
    predicted_bytes: float

    def describe(self) -> str:
        """Return one line."""
        return (
            f"--{self.setting} {self.value} (now {self.now:,}), {self.given}:"
            f" {self.predicted_bytes / MIB:,.0f} MiB predicted"
        )


def free_bytes() -> int:
    """Return the memory available to a new process, within the limits of the container.

    Raises: ConfigError: this system does not report it.
    """
    found = []
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").split("\n")
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # `max` means no limit and raises ValueError
        found.append(limit - int((group / "memory.current").read_text(encoding="ascii")))
    if not found:
        with suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if not found:
        raise ConfigError("this system does not report how much memory is free; give --memory-mib N.")
    return max(0, min(found))


def along(places: Sequence[int], values: Sequence[float]) -> Callable[[int], float]:
    """Return the interpolated peak memory as a function of the size, given the peaks at some sizes."""
    return lambda place: continued(places, values, place)


def largest(peak: Callable[[int], float], limit: float, least: int, most: int = LONGEST) -> tuple[int, float]:
    """Return the largest number whose peak is within the limit, found by bisection, and that peak."""
    if peak(least) > limit:
        raise ConfigError(
            f"Not even the smallest step fits: {peak(least) / MIB:,.0f} MiB are predicted for it, and"
            f" {limit / MIB:,.0f} MiB are to be used. Take a smaller model, or more memory."
        )
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= limit else (low, middle)
    return low, peak(low)


def describe_fits(
    config: RunConfig, fit: Callable[[RunConfig, float], list[Fit]], memory_mib: int | None = None
) -> str:
    """Return the output of `train --fit`.

    Args:
        config: settings of the run.
        fit: `tasks.runs.fit`.
        memory_mib: memory to use; None: `SHARE` of the free memory.
    """
    free = memory_mib * MIB if memory_mib else free_bytes()
    limit = free if memory_mib else SHARE * free
    lines = [f"{free / MIB:,.0f} MiB of memory are free, {limit / MIB:,.0f} of them to be used. Largest values:"]
    return "\n".join([*lines, *(f"  {one.describe()}" for one in fit(replace(config, device="cpu"), limit))])
