"""Weights as arrays of NumPy, for `manyheads export --to numpy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from manyheads.extras.exports import ExportOptions, Format, NotComparedError

NUMPY = Format("numpy", ("bag",), "weights as weights.npz", "", __name__)


def write(model: Path, target: Path, options: ExportOptions) -> list[str]:
    """Write all weights under their names."""
    from manyheads.models.pretrained import load_weights

    np.savez(target / "weights.npz", **{name: value.numpy() for name, value in load_weights(model).items()})
    return ["The weights are float32."]


def deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Any:
    """Raises: NotComparedError: always."""
    raise NotComparedError("an archive of arrays computes nothing")
