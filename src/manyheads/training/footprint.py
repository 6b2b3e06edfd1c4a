"""How much memory a run will take at a length that it was never tried at.

Short steps are taken, every allocation of torch is counted, and what was held at the peak is continued to the length
asked for: along a line for Reformers, whose every part is linear in it, along a parabola for others. Counting is exact
and repeatable, where the size of a process is neither; so a line through short steps may be followed far. How much more
than its tensors a process holds is seen once, at the longest of these steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from manyheads.architectures.reformer.config import ReformerConfig
from manyheads.architectures.table import build_model
from manyheads.data.batch import PairBatch
from manyheads.data.preparing import Progress
from manyheads.data.segments import SegmentBatch
from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed
from manyheads.training.device import computing, peak_memory_bytes
from manyheads.training.language_modelling import begin_hashing
from manyheads.training.optimiser import build_optimiser
from manyheads.training.precision import resolve_precision
from manyheads.training.settings import TextConfig, TrainConfig
from manyheads.training.step import Stepper

__all__ = ["Footprint", "continued", "held_at_peak", "predict_memory", "predict_pairs", "take_steps"]

LONGEST_PROBE = 8192
SHORT = 64
MOST_BESIDES = 3.0
BYTES, PIECES = 256, 8000
TRYING = "trying steps"
STEPS = 2
"""The first step of an optimiser makes its moments; the second has them from the beginning."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of a training run on a CPU, in bytes.

    program: of Python, torch and this package. state: weights, gradients and what the optimiser keeps. step: what a
    step holds besides at its peak. length, rows: of what a step works on at once. probes: lengths that were tried.
    """

    program_bytes: int
    state_bytes: int
    step_bytes: int
    length: int
    rows: int
    precision: str
    probes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """The peak of the process."""
        return self.program_bytes + self.state_bytes + self.step_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "length": self.length,
            "rows": self.rows,
            "precision": self.precision,
            "total_bytes": self.total_bytes,
            "program_bytes": self.program_bytes,
            "state_bytes": self.state_bytes,
            "step_bytes": self.step_bytes,
            "probed_lengths": list(self.probes),
        }


def predict_memory(
    config: TextConfig, length: int, rows: int | None = None, progress: Progress | None = None
) -> Footprint:
    """Predict the peak of a language model's training on a CPU.

    Args:
        config: of the run; neither its data nor its folder is opened.
        length: tokens of a segment.
        rows: sequences of a micro-batch; None takes the config's lanes, by its accumulate.
        progress: told after each step how many of all are done.

    Raises: ConfigError: the length is out of range, or the size of the vocabulary is unknown.
    Cost: that of building the model and of some steps of at most 8,192 tokens a row.
    """
    rows = -(-config.data.lanes // config.data.accumulate) if rows is None else rows
    if length < 1 or rows < 1:
        raise ConfigError(f"a length of {length} and {rows} rows are asked for; both must be at least 1.")
    config = resolve_precision(_filled(config, length), torch.device("cpu"))
    longest = min(length, LONGEST_PROBE)
    is_linear = isinstance(config.model, ReformerConfig)
    probes: tuple[int, ...] = (length,)
    if length > longest:
        probes = (longest // 2, longest) if is_linear else (longest // 8, longest // 4, longest // 2)
    with computing(replace(config, device="cpu"), torch.device("cpu")):
        told = _counting(progress, STEPS * (2 + len(probes)))
        take_steps(config, min(length, SHORT), 1, told)  # what is loaded when it is first needed is part of the program
        program = _resident_bytes()
        _forget_peak()
        take_steps(config, probes[-1], rows, told)
        real = _peak_resident_bytes() - program
        found = [held_at_peak(config, probe, rows, told) for probe in probes]
    state = found[0][1]
    counted = continued(probes, [peak for peak, _ in found], length)
    # Pages that are left between blocks, and what kernels take for themselves, are not among the tensors counted.
    share = min(max(real / found[-1][0], 1.0), MOST_BESIDES)
    return Footprint(
        program_bytes=program,
        state_bytes=state,
        step_bytes=max(0, round(counted * share) - state),
        length=length,
        rows=rows,
        precision=config.precision,
        probes=probes,
    )


def predict_pairs(config: TrainConfig, length: int, rows: int) -> Footprint:
    """Predict the peak of a translator's training on a CPU, by steps of just that size.

    Args:
        config: of the run; neither its data nor its folder is opened.
        length: tokens of every source and target.
        rows: pairs of a micro-batch.
    """
    model, size = config.model, config.tokenizer.vocab_size
    model = replace(
        model,
        source_vocab_size=model.source_vocab_size or size,
        target_vocab_size=model.target_vocab_size or size,
    )
    config = resolve_precision(replace(config, model=model), torch.device("cpu"))
    with computing(replace(config, device="cpu"), torch.device("cpu")):
        take_steps(config, min(length, SHORT), 1)
        program = _resident_bytes()
        _forget_peak()
        take_steps(config, length, rows)
        real = _peak_resident_bytes() - program
        counted, state = held_at_peak(config, length, rows)
    share = min(max(real / counted, 1.0), MOST_BESIDES)
    return Footprint(
        program_bytes=program,
        state_bytes=state,
        step_bytes=max(0, round(counted * share) - state),
        length=length,
        rows=rows,
        precision=config.precision,
        probes=(length,),
    )


def _counting(progress: Progress | None, total: int) -> Callable[[], None]:
    """A function to be called after each of `total` steps."""
    if progress is None:
        return lambda: None
    progress(TRYING, 0, total)
    numbers = count(1)
    return lambda: progress(TRYING, next(numbers), total)


def _filled(config: TextConfig, length: int) -> TextConfig:
    """The config with a vocabulary's size, and segments of that length."""
    model = config.model
    if isinstance(model, ReformerConfig) and model.positions != "sinusoidal" and length > model.max_len:
        raise ConfigError(
            f"--length {length:,} is above model.max_len {model.max_len:,}, the positions that the model has; raise it"
            " (and axial_shape with it), or ask for less."
        )
    if not model.vocab_size:
        known = {"bytes": BYTES + 1, "bpe": PIECES}.get(config.vocabulary.level)
        size = config.vocabulary.vocab_size or known
        if size is None:
            raise ConfigError("model.vocab_size is 0 and words are not counted yet; set it to see the memory.")
        model = replace(model, vocab_size=size)
    data = replace(config.data, segment_len=length, segment_lengths="fixed")
    reading = replace(config.reading, segment_len=min(config.reading.segment_len, length))
    return replace(config, model=model, data=data, reading=reading)


def held_at_peak(
    config: TextConfig | TrainConfig, length: int, rows: int, told: Callable[[], None] | None = None
) -> tuple[int, int]:
    """The most bytes that torch held while `take_steps` ran, and what that returned."""
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quietly():
        watched.start()
    try:
        state, average = take_steps(config, length, rows, told)
    finally:
        with _quietly():
            watched.stop()
    return _peak(watched) + average, state + average


def take_steps(
    config: TextConfig | TrainConfig, length: int, rows: int, told: Callable[[], None] | None = None
) -> tuple[int, int]:
    """Build a model and take steps on random ids.

    Args:
        config: of the run, with the vocabulary's size.
        length: tokens of a segment.
        rows: segments of it side by side.
        told: called after each step.

    Returns: bytes of weights, gradients and optimiser; and those of the average, which a run holds besides.
    """
    torch.manual_seed(derive_seed(config.seed, "weights"))
    model: Any = build_model(config.model)
    optimiser = build_optimiser(model, config.optimiser, config.precision)
    device = torch.device("cpu")
    batch: Any
    if isinstance(config, TrainConfig):
        batch = _pairs(config, length, rows)
        stepper = Stepper(model, optimiser, config, device)
    else:
        batch = _segments(config, length, rows)
        text = config
        stepper = Stepper(
            model, optimiser, config, device, begin=lambda lanes, seed: begin_hashing(text, model, lanes, seed)
        )
    for step in range(1, STEPS + 1):
        stepper.take([batch], step, 0.0)
        if told is not None:
            told()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    kept = sum(
        value.nbytes
        for state in optimiser.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return 2 * weights + kept, weights if config.training.ema_decay else 0


def _segments(config: TextConfig, length: int, rows: int) -> SegmentBatch:
    ids = torch.randint(config.model.vocab_size, (rows, length + 1))
    return SegmentBatch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        lengths=torch.full((rows,), length),
        resets=torch.zeros(rows, dtype=torch.bool),
        sample_ids=torch.arange(rows),
    )


def _pairs(config: TrainConfig, length: int, rows: int) -> PairBatch:
    lengths = torch.full((rows,), length)
    sizes = (config.model.source_vocab_size, config.model.target_vocab_size)
    source, target = (torch.randint(size, (rows, length)) for size in sizes)
    return PairBatch(source, lengths, target, lengths, torch.arange(rows))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch's profiler writes on standard error from below Python when it starts and stops."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _peak(watched: Any) -> int:
    """The largest sum of bytes allocated less bytes freed, in the order of time."""
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def continued(lengths: Sequence[int], values: Sequence[float], length: int) -> float:
    """The polynomial through the points, at a length (Lagrange)."""
    total = 0.0
    for i, (place, value) in enumerate(zip(lengths, values, strict=True)):
        share = 1.0
        for j, other in enumerate(lengths):
            share *= (length - other) / (place - other) if j != i else 1.0
        total += share * value
    return total


def _forget_peak() -> None:
    """Begin anew to watch for the most memory that the process holds, where the system can."""
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("5")


def _peak_resident_bytes() -> int:
    """The most that the process held since `_forget_peak`, or ever."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return peak_memory_bytes(torch.device("cpu"))


def _resident_bytes() -> int:
    """What the process holds now, of memory; its peak where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak_memory_bytes(torch.device("cpu"))
