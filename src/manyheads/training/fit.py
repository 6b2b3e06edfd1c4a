"""`--fit`: the largest step for the memory there is, found before the run by steps that are small enough.

Memory grows along a line with the rows of a step, and with its length along a line (Reformers) or a parabola (others);
so a few short steps tell where it will meet the limit. See `footprint` for how they are counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from manyheads.architectures.reformer.config import ReformerConfig
from manyheads.errors import ConfigError
from manyheads.training.footprint import continued, predict_memory, predict_pairs
from manyheads.training.settings import RunConfig, TextConfig, TrainConfig

__all__ = ["Fit", "fit", "free_bytes"]

SHARE = 0.9
"""Of what is free: a prediction is good to some percent, and a machine is never alone."""

SHORT_PAIR = 16
_PROBE_ROWS = (1, 4)
_PROBE_TOKENS = (512, 2048)
_LONGEST = 1 << 24
MIB = 2**20


@dataclass(frozen=True)
class Fit:
    """The largest value of a setting.

    now: what the config has. given: what else it depends on, in words. predicted_bytes: the peak of the process.
    """

    setting: str
    value: int
    now: int
    given: str
    predicted_bytes: float

    def describe(self) -> str:
        """One line."""
        return (
            f"--{self.setting} {self.value} (now {self.now:,}), {self.given}:"
            f" {self.predicted_bytes / MIB:,.0f} MiB predicted"
        )


def free_bytes() -> int:
    """Memory that a new process may take: what the system calls available, within the limits of the container.

    Raises: ConfigError: this system does not say.
    """
    found = []
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").split("\n")
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # `max` is no number, and no limit
        found.append(limit - int((group / "memory.current").read_text(encoding="ascii")))
    if not found:
        with suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if not found:
        raise ConfigError("this system does not say how much memory is free; give --memory-mib N.")
    return max(0, min(found))


def fit(config: RunConfig, limit_bytes: float) -> list[Fit]:
    """The largest settings of a training on a CPU whose peak stays within a limit.

    Args:
        config: of the run; neither its data nor its folder is opened.
        limit_bytes: of the process.

    Raises: ConfigError: not even the smallest step fits.
    """
    if isinstance(config, TextConfig):
        return [_lanes(config, limit_bytes), _length(config, limit_bytes)]
    assert isinstance(config, TrainConfig)
    return [_max_tokens(config, limit_bytes)]


def _lanes(config: TextConfig, limit: float) -> Fit:
    length, accumulate = config.data.segment_len, config.data.accumulate
    peaks = [predict_memory(config, length, rows).total_bytes for rows in _PROBE_ROWS]
    rows, predicted = _largest(_along(_PROBE_ROWS, peaks), limit, 1)
    given = f"segment_len {length:,}" + (f", accumulate {accumulate}" if accumulate > 1 else "")
    return Fit("data.lanes", rows * accumulate, config.data.lanes, given, predicted)


def _length(config: TextConfig, limit: float) -> Fit:
    now, lanes = config.data.segment_len, config.data.lanes
    longest = max(now, 64)
    is_linear = isinstance(config.model, ReformerConfig)
    probes = [longest // 2, longest] if is_linear else [longest // 4, longest // 2, longest]
    most = _LONGEST
    if isinstance(config.model, ReformerConfig) and config.model.positions != "sinusoidal":
        most = config.model.max_len
        probes = [min(probe, most) for probe in probes]
    peaks = [predict_memory(config, probe).total_bytes for probe in probes]
    length, predicted = _largest(_along(probes, peaks), limit, 1, most)
    return Fit("data.segment_len", length, now, f"lanes {lanes:,}", predicted)


def _max_tokens(config: TrainConfig, limit: float) -> Fit:
    """Long sentences have more scores, short ones more rows; whichever takes more of a token decides."""
    accumulate = config.data.accumulate
    longest = max(config.data.max_source_len, config.data.max_target_len)
    found = []
    for length in {min(SHORT_PAIR, longest), longest}:
        rows = [max(1, tokens // length) for tokens in _PROBE_TOKENS]
        rows[1] = max(rows[1], rows[0] + 1)
        peaks = [predict_pairs(config, length, count).total_bytes for count in rows]
        tokens = [count * length for count in rows]
        found.append(_largest(_along(tokens, peaks), limit, length))
    value, predicted = min(found)
    given = f"sentences of at most {longest:,}" + (f", accumulate {accumulate}" if accumulate > 1 else "")
    return Fit("data.max_tokens", value * accumulate, config.data.max_tokens, given, predicted)


def _along(places: Sequence[int], values: Sequence[float]) -> Callable[[int], float]:
    return lambda place: continued(places, values, place)


def _largest(peak: Callable[[int], float], limit: float, least: int, most: int = _LONGEST) -> tuple[int, float]:
    """The largest number whose peak is within the limit, by halving; and that peak."""
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


def plan(config: RunConfig, memory_mib: int | None = None) -> str:
    """What `train --fit` prints."""
    free = memory_mib * MIB if memory_mib else free_bytes()
    limit = free if memory_mib else SHARE * free
    config = replace(config, device="cpu")
    lines = [f"{free / MIB:,.0f} MiB of memory are free, {limit / MIB:,.0f} of them to be used. Largest by themselves:"]
    return "\n".join([*lines, *(f"  {one.describe()}" for one in fit(config, limit))])
