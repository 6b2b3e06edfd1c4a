"""The task of the model that a command names, so that each task has its own options."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.tasks.table import task_of_model

__all__ = ["task_of_arguments"]


def task_of_arguments(arguments: Sequence[str]) -> str | None:
    """The task of the first argument that is the folder of a model or a run (see `tasks.table.task_of_model`)."""
    return next((task for one in arguments if not one.startswith("-") and (task := task_of_model(one))), None)
