"""Fixtures of the tests of TensorFlow checkpoints."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def fixtures(shared: Path) -> Path:
    folder = shared / "fixtures" / "tf-transformer-xl"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    return folder
