"""Lengths that change during training: of segments, by the progress of the run; of the memory, by the step.

Both are functions of settings, seed and position, so nothing about them is stored and a run can resume at any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed

NUM_MEMORY_LENS = 4
"""Different memory lengths of a run. A compiler makes a program for each, so there are few.

The rest of the memory is cut off, not masked: a step of `xl-demo` in fp32 on one core takes 0.42 s with 32 of its 128
positions, 0.53 s if the others are masked, and 0.51 s with all of them.
"""


@dataclass(frozen=True)
class Stage:
    """Segments of `length` tokens until the run has made the share `until` of its progress."""

    length: int
    until: float


def stages_of(schedule: Sequence[str], segment_len: int) -> tuple[Stage, ...]:
    """Return the stages of `data.length_schedule`.

        >>> stages_of(["1024=0.3", "16384=1"], 16384)
        (Stage(length=1024, until=0.3), Stage(length=16384, until=1.0))

    Args:
        schedule: `LENGTH=SHARE`.
        segment_len: the length of the last stage.

    Raises: ConfigError: an entry has another form, a length does not divide segment_len, shares do not increase, or the
        last stage is not segment_len until 1.
    """
    stages = tuple(map(_stage, schedule))
    for stage in stages:
        if stage.length > segment_len:
            raise _mistake(
                f"contains {stage.length:,}, longer than data.segment_len {segment_len:,}; lower it, or raise"
                " segment_len to the longest length.",
            )
        if segment_len % stage.length:
            raise _mistake(
                f"contains {stage.length:,}, which does not divide data.segment_len {segment_len:,}, so a step would"
                " not have the same number of tokens; take a divisor.",
            )
    for before, stage in pairwise(stages):
        if stage.until <= before.until:
            raise _mistake(
                f"has the share {stage.until:g} after {before.until:g}; shares are the progress at which a length ends,"
                " so they must increase."
            )
    if stages and stages[-1] != Stage(segment_len, 1.0):
        last = stages[-1]
        raise _mistake(
            f"ends with {last.length:,} until {last.until:g}; the last entry must be data.segment_len until 1:"
            f" {segment_len}=1."
        )
    return stages


def _stage(entry: str) -> Stage:
    length, _, share = entry.partition("=")
    try:
        stage = Stage(int(length), float(share))
    except ValueError:
        stage = Stage(0, 0.0)
    if stage.length < 1 or not 0 < stage.until <= 1:
        raise _mistake(
            f"contains {entry!r}; write LENGTH=SHARE, tokens of a segment and the progress at which they end, in"
            " (0, 1], such as 1024=0.3."
        )
    return stage


def _mistake(text: str) -> ConfigError:
    return ConfigError(f"data.length_schedule {text}", fields=["length_schedule"])


def length_at(stages: Sequence[Stage], progress: float) -> int:
    """Return the length of the segments of a step.

    Args:
        stages: at least one.
        progress: of the run before the step, in [0, 1].
    """
    return next((stage.length for stage in stages if progress < stage.until), stages[-1].length)


def memory_lens(shortest: int, longest: int) -> tuple[int, ...]:
    """Return the memory lengths that a run uses: up to four, evenly spaced.

    >>> memory_lens(64, 256)
    (64, 128, 192, 256)
    """
    most = NUM_MEMORY_LENS - 1
    return tuple(sorted({shortest + (longest - shortest) * number // most for number in range(most + 1)}))


def memory_len_at(bounds: Sequence[int], seed: int, epoch: int, row: int) -> int:
    """Return the memory length of a step, each of `memory_lens` equally often.

    Args:
        bounds: the shortest and the longest.
        seed: the run's seed.
        epoch, row: the position of the step.
    """
    lens = memory_lens(*bounds)
    return lens[derive_seed(seed, "memory length", epoch, row) % len(lens)]
