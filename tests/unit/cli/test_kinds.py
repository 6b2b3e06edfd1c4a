"""What a folder's model is for is told without torch; this holds it together with the table that says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyheads.architectures.table import ARCHITECTURES
from manyheads.cli.kinds import names_language_model


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("inner", ["", "model"])
def test_what_a_folder_is_for(tmp_path: Path, architecture: str, inner: str) -> None:
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architecture": architecture}))
    expected = ARCHITECTURES[architecture].task == "language-modelling"
    assert names_language_model(["--json", str(tmp_path)]) is expected
