"""The folder of TensorFlow checkpoints, and what tests of attention alone begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manyheads.nn.kernels import modes


@pytest.fixture(scope="module")
def fixtures(shared: Path) -> Path:
    folder = shared / "fixtures" / "tf-transformer-xl"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    return folder


@pytest.fixture
def fast_and_seeded() -> Iterator[None]:
    """Reproducible numbers, and the fast implementations, as in `tests/unit/nn`."""
    torch.manual_seed(0)
    with modes.fast():
        yield
