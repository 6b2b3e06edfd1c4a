"""`--dry-run`: everything up to one optimiser step, without saving anything."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from manyheads.decoding.device import choose_device
from manyheads.training.run.assembly import assemble
from manyheads.training.run.device import computing, peak_memory_bytes
from manyheads.training.run.objective import OpenObjective
from manyheads.training.run.precision import Level, resolve_precision
from manyheads.training.run.run_folder import RunFolder
from manyheads.training.run.state import named_parameters
from manyheads.training.settings import RunConfig

__all__ = ["DryRun", "dry_run"]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A description of a planned run.

    shapes: every parameter's name and shape. batch: description of the micro-batches of the first step. state_bytes:
    weights, gradients, moments and averages. peak_bytes: peak memory of the step, activations included (on a CPU: of
    the
    whole process). fault: the reason why the first step would fail, or None.
    """

    config: RunConfig
    device: str
    data: str
    shapes: dict[str, tuple[int, ...]]
    num_parameters: int
    batch: tuple[str, ...]
    steps_an_epoch: int
    state_bytes: int
    peak_bytes: int
    loss: float
    step_seconds: float
    fault: str | None

    def describe(self) -> str:
        """Return all of it as text, one line each."""
        width = max(len(name) for name in self.shapes)
        rows = [f"  {name:<{width}}  {' x '.join(map(str, shape))}" for name, shape in self.shapes.items()]
        return "\n".join(
            [
                self.data,
                *rows,
                f"{self.num_parameters:,} parameters on {self.device}, {self.config.precision}",
                f"first step: {', '.join(self.batch)}; {self.steps_an_epoch:,} steps per epoch",
                f"memory: {self.state_bytes / 2**20:,.0f} MiB for weights, gradients and optimiser;"
                f" {self.peak_bytes / 2**20:,.0f} MiB at the peak of one step",
                f"one step: {self.step_seconds:.2f} s, loss {self.loss:.4f} per token (nothing was saved)",
                *([f"the step fails: {self.fault}"] if self.fault else []),
            ]
        )


def dry_run(
    config: RunConfig, open_objective: OpenObjective, tell: Callable[[str, Level], None] = lambda text, level: None
) -> DryRun:
    """Open the data, build the model and compute one step, without creating or changing a run folder.

    Args:
        config: settings of the run.
        open_objective: opens the data of the run's task.
        tell: receives messages about the precision (see `precision.resolve_precision`).

    Raises: ManyHeadsError: the errors that `train` would raise before and in its first step.
    """
    device = choose_device(config.device)
    folder = RunFolder(Path(config.run_dir))
    folder.check()
    with tempfile.TemporaryDirectory() as aside, computing(config, device):
        config = resolve_precision(config, device, tell=tell)
        assembly = assemble(config, open_objective, device, folder.data if folder.data.is_dir() else Path(aside))
        batches = assembly.stream.at(0, 0)
        started = time.monotonic()
        result = assembly.stepper().take(batches, 1, 0.0)
        seconds = time.monotonic() - started
        named = named_parameters(assembly.model)
        weights = sum(parameter.nbytes for parameter in named.values())
        return DryRun(
            config=assembly.config,
            device=str(device),
            data=assembly.objective.describe(),
            shapes={name: tuple(parameter.shape) for name, parameter in named.items()},
            num_parameters=sum(parameter.numel() for parameter in named.values()),
            batch=tuple(batch.describe() for batch in batches),
            steps_an_epoch=assembly.stream.rows(0),
            state_bytes=weights * (4 + (assembly.average is not None)),
            peak_bytes=peak_memory_bytes(device),
            loss=result.loss_sum / result.num_tokens,
            step_seconds=seconds,
            fault=None if result.fault is None else str(result.fault),
        )
