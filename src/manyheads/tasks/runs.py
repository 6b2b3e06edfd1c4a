"""Training and planning of any task: the functions of `training`, with the objective that the config names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from manyheads.data.progress import Progress
from manyheads.distributed.group import Group
from manyheads.tasks.table import task_of
from manyheads.training.plan import dry_run as planning
from manyheads.training.plan.dry_run import DryRun
from manyheads.training.plan.fit import Fit, describe_fits
from manyheads.training.record.report import Reporter, TrainResult
from manyheads.training.run import assembly, loop
from manyheads.training.run.assembly import Assembly
from manyheads.training.run.objective import Objective, Translate
from manyheads.training.run.precision import Level
from manyheads.training.settings import RunConfig

__all__ = ["assemble", "dry_run", "fit", "open_objective", "plan", "train"]


def open_objective(config: RunConfig, data_dir: Path, progress: Progress | None = None) -> Objective:
    """Open the data of a run.

    Args:
        config: of the run.
        data_dir: where an embedded corpus is prepared; a resumed run finds it there again.
        progress: told how far that is.

    Raises: DataError, ConfigError, SaveError: the data cannot be used.
    """
    objective: Objective = task_of(config).module("objective").open_objective(config, data_dir, progress)
    return objective


def assemble(config: RunConfig, device: torch.device, data_dir: Path, group: Group | None = None) -> Assembly:
    """Data, model and optimiser of a run; see `training.run.assembly.assemble`."""
    return assembly.assemble(config, open_objective, device, data_dir, group)


def train(
    config: RunConfig,
    *,
    resume: str = "auto",
    reporter: Reporter | None = None,
    translate: Translate | None = None,
    group: Group | None = None,
) -> TrainResult:
    """Train; see `training.run.loop.train`."""
    return loop.train(config, open_objective, resume=resume, reporter=reporter, translate=translate, group=group)


def dry_run(config: RunConfig, tell: Callable[[str, Level], None] = lambda text, level: None) -> DryRun:
    """Open the data, build the model and take one step; see `training.plan.dry_run.dry_run`."""
    return planning.dry_run(config, open_objective, tell)


def fit(config: RunConfig, limit_bytes: float) -> list[Fit]:
    """The largest settings of a training on a CPU whose peak memory stays within a limit.

    Args:
        config: of the run; neither its data nor its folder is opened.
        limit_bytes: of the process.

    Raises: ConfigError: not even the smallest step fits.
    """
    found: list[Fit] = task_of(config).module("plan").fit(config, limit_bytes)
    return found


def plan(config: RunConfig, memory_mib: int | None = None) -> str:
    """The output of `train --fit`."""
    return describe_fits(config, fit, memory_mib)
