"""Training: objective, optimiser, schedule, step, loop, resume, log. `train` is the door."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads.training.loop import train as train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        return importlib.import_module("manyheads.training.loop").train
    raise AttributeError(f"module 'manyheads.training' has no attribute {name!r}")
