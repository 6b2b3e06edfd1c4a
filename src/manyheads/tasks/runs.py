"""Training and planning of any task: the functions of `training`, with the objective that the config names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from manyheads.data.progress import Progress
from manyheads.distributed.group import Group
from manyheads.tasks.table import task_of
from manyheads.training.plan.first_step import FirstStep, first_step
from manyheads.training.plan.planner import Planner
from manyheads.training.plan.trial import Trial
from manyheads.training.record.report import Reporter, TrainResult
from manyheads.training.run import assembly, loop
from manyheads.training.run.assembly import Assembly
from manyheads.training.run.objective import Objective, Translate
from manyheads.training.run.precision import Level
from manyheads.training.settings import RunConfig

__all__ = ["assemble", "dry_run", "open_objective", "planner", "train"]


def open_objective(config: RunConfig, data_dir: Path, progress: Progress | None = None) -> Objective:
    """Open the data of a run.

    Args:
        config: of the run.
        data_dir: the folder of an embedded corpus after its preparation; a resumed run finds it there again.
        progress: called with the progress of the preparation.

    Raises: DataError, ConfigError, SaveError: the data cannot be used.
    """
    objective = task_of(config).module("objective").open_objective(config, data_dir, progress)
    assert isinstance(objective, Objective), f"{type(objective).__name__} lacks a part of the interface"
    return objective


def assemble(config: RunConfig, device: torch.device, data_dir: Path, group: Group | None = None) -> Assembly:
    """Return data, model and optimiser of a run; see `training.run.assembly.assemble`."""
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


def planner(config: RunConfig) -> Planner:
    """Return the object that predicts the memory of a run."""
    return Planner(_trial(config))


def dry_run(config: RunConfig, tell: Callable[[str, Level], None] = lambda text, level: None) -> FirstStep:
    """Compute the first step of a run and save nothing; see `training.plan.first_step.first_step`."""
    return first_step(_trial(config), open_objective, tell)


def _trial(config: RunConfig) -> Trial:
    trial: Trial = task_of(config).module("plan").Trial(config)
    return trial
