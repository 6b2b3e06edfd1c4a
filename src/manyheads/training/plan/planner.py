"""The memory of a run before it begins, and the largest step that fits.

Memory is predicted from short steps on random ids. It is linear in the rows of a step, and linear or quadratic in its
length, so the polynomial through the peaks of some steps gives the peak of any other step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from manyheads.data.lines import Progress
from manyheads.errors import ConfigError
from manyheads.training.plan import measuring
from manyheads.training.plan.trial import Knob, Trial, trial_of
from manyheads.training.run.device import computing, free_memory_bytes
from manyheads.training.run.precision import resolve_precision
from manyheads.training.settings import RunConfig

LONGEST_PROBE = 8192
"""Longer steps are not measured, but extrapolated from shorter ones."""

MIB = 2**20
_SHORT = 64
_MOST_OVERHEAD = 3.0
_SHARE = 0.9
"""The share of the free memory to use: a prediction is accurate to some percent, and other processes need memory
too."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of a training run on a CPU, in bytes.

    program_bytes: Python, torch and this package. state_bytes: weights, gradients, the optimiser's state and averages.
    step_bytes: the additional peak memory of a step. length, rows: of a micro-batch. probes: lengths of the measured
    steps. overhead: memory of a step divided by the memory of its counted tensors. vocabulary: see `Trial`.
    """

    program_bytes: int
    state_bytes: int
    step_bytes: int
    length: int
    rows: int
    precision: str
    probes: tuple[int, ...]
    overhead: float = 1.0
    vocabulary: str = ""

    @property
    def total_bytes(self) -> int:
        """Peak memory of the process."""
        return self.program_bytes + self.state_bytes + self.step_bytes

    def describe(self) -> str:
        """Return a table of the parts."""
        rows = f"{self.rows:,} sequence{'s' if self.rows > 1 else ''}"
        parts = {
            "program": self.program_bytes,
            "weights, gradients, optimiser": self.state_bytes,
            f"a step of {rows} of {self.length:,} tokens": self.step_bytes,
            "together": self.total_bytes,
        }
        width = max(map(len, parts))
        lines = [f"  {name:<{width}}  {size / MIB:>10,.0f} MiB" for name, size in parts.items()]
        probes = " and ".join(f"{probe:,}" for probe in self.probes)
        head = f"peak memory of training on a CPU in {self.precision}"
        told = [self.vocabulary] if self.vocabulary else []
        return "\n".join([head, *lines, f"measured in steps of {probes} tokens", *told])

    def to_json(self) -> dict[str, Any]:
        """Return the sizes by name."""
        record = asdict(self)
        probes, _ = record.pop("probes"), record.pop("overhead")
        return {**record, "total_bytes": self.total_bytes, "probed_lengths": probes}


@dataclass(frozen=True)
class Fit:
    """The largest value of a setting, and the peak memory of the process that is predicted for it."""

    knob: Knob
    value: int
    predicted_bytes: float

    def describe(self) -> str:
        """Return one line."""
        return (
            f"--{self.knob.setting} {self.value} (now {self.knob.now:,}), {self.knob.given}:"
            f" {self.predicted_bytes / MIB:,.0f} MiB predicted"
        )


@dataclass(frozen=True)
class Planner:
    """Predicts the memory of a run.

    Attributes:
        config: of the run.
    """

    config: RunConfig

    @property
    def trial(self) -> Trial:
        """The run without its data."""
        return trial_of(self.config)

    def memory(self, length: int, rows: int | None = None, progress: Progress | None = None) -> Footprint:
        """Predict the peak memory of training on a CPU. Neither the run's data nor its folder is opened.

        Args:
            length: tokens of each row of a micro-batch; of pairs, of the source and of the target.
            rows: rows of a micro-batch; None: as in the config.
            progress: called after each step with the number of finished steps and the total.

        Raises: ConfigError: length or rows are out of range, or the size of the vocabulary is unknown.

        Cost: building the model and two steps for each probe.
        """
        rows = self.trial.rows if rows is None else rows
        if length < 1 or rows < 1:
            raise ConfigError(f"a length of {length} and {rows} rows are asked for; both must be at least 1.")
        trial, cpu = self.trial.at(length), torch.device("cpu")
        config = resolve_precision(trial.config, cpu)
        probes = _probe_lengths(length, config.model.memory_degree)
        with computing(config, cpu):
            told = measuring.counting_steps(progress, 2 + len(probes))
            # The first step loads libraries, whose memory counts as the program's.
            measuring.take_steps(trial, config, min(length, _SHORT), 1, told)
            program = measuring.resident_bytes()
            measuring.forget_peak()
            measuring.take_steps(trial, config, probes[-1], rows, told)
            real = measuring.peak_resident_bytes() - program
            found = [measuring.peak_and_state_bytes(trial, config, probe, rows, told) for probe in probes]
        peaks, states = zip(*found, strict=True)
        counted = _polynomial(dict(zip(probes, peaks, strict=True)), length)
        # Kernels and gaps between memory blocks are not part of the counted tensors.
        overhead = min(max(real / peaks[-1], 1.0), _MOST_OVERHEAD)
        return Footprint(
            program_bytes=program,
            state_bytes=states[0],
            step_bytes=max(0, round(counted * overhead) - states[0]),
            length=length,
            rows=rows,
            precision=config.precision,
            probes=probes,
            overhead=overhead,
            vocabulary=trial.vocabulary,
        )

    def largest(self, limit_bytes: float) -> list[Fit]:
        """Return the largest settings of a training on a CPU whose peak memory stays within the limit.

        Raises: ConfigError: not even the smallest step fits.
        """
        found: dict[str, Fit] = {}
        for knob in self.trial.knobs():
            found_at = {size: self.memory(*step) for size, step in sorted(knob.steps.items())}
            # Only the counted tensors grow with the size. The rest varies from step to step, most in small steps, so a
            # polynomial through the sum of both would be useless.
            program = max(one.program_bytes for one in found_at.values())
            overhead = [one.overhead for one in found_at.values()][-1]
            peaks = {
                size: program + overhead * (one.state_bytes + one.step_bytes) / one.overhead
                for size, one in found_at.items()
            }
            fit = _largest(knob, peaks, limit_bytes)
            if knob.setting not in found or fit.value < found[knob.setting].value:
                found[knob.setting] = fit
        return list(found.values())

    def describe_largest(self, memory_mib: int | None = None) -> str:
        """Return `largest` as text. memory_mib: memory to use; None: nine tenths of the free memory.

        Raises: ConfigError: see `largest`; or this system does not report its free memory.
        """
        free = memory_mib * MIB if memory_mib else free_memory_bytes(torch.device("cpu"))
        if free is None:
            raise ConfigError("this system does not report how much memory is free; give --memory-mib N.")
        limit = free if memory_mib else _SHARE * free
        lines = [f"{free / MIB:,.0f} MiB of memory are free, {limit / MIB:,.0f} of them to be used. Largest values:"]
        told = self.trial.at(self.trial.longest).vocabulary
        return "\n".join([*lines, *(f"  {fit.describe()}" for fit in self.largest(limit)), *filter(None, [told])])


def _probe_lengths(length: int, degree: int) -> tuple[int, ...]:
    """Return lengths of steps from which the memory at a length can be extrapolated.

    Args: degree: of the polynomial (see `models.protocols.ModelConfig.memory_degree`).
    """
    if length <= LONGEST_PROBE:
        return (length,)
    return tuple(LONGEST_PROBE // part for part in ((2, 1) if degree == 1 else (8, 4, 2)))


def _largest(knob: Knob, peaks: Mapping[int, float], limit: float) -> Fit:
    """Return the largest value whose peak is within the limit, found by bisection."""
    least = _polynomial(peaks, knob.least)
    if least > limit:
        raise ConfigError(
            f"Not even the smallest step fits: {least / MIB:,.0f} MiB are predicted for it, and {limit / MIB:,.0f} MiB"
            " are to be used. Take a smaller model, or more memory."
        )
    low, high = knob.least, knob.most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _polynomial(peaks, middle) <= limit else (low, middle)
    return Fit(knob, low * knob.accumulate, _polynomial(peaks, low))


def _polynomial(points: Mapping[int, float], x: int) -> float:
    """Return the value at x of the polynomial through the points (Lagrange)."""
    total = 0.0
    for one, value in points.items():
        share = 1.0
        for other in points:
            share *= (x - other) / (one - other) if other != one else 1.0
        total += share * value
    return total
