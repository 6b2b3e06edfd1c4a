"""A revision belongs to a model on the hub; a folder has none."""

from pathlib import Path

import pytest

from manyheads import Generator, Translator
from manyheads.cli.main import main
from manyheads.errors import ModelFileError
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import load


def test_a_folder_with_a_revision_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """For every reader, and before anything is read; it would not be the model that was asked for."""
    (tmp_path / "config.json").write_text("{}")
    for read in (resolve_model_path, load, Translator.from_pretrained, Generator.from_pretrained):
        with pytest.raises(ModelFileError, match=r"is on this machine, where models have no revisions.*no-such-commit"):
            read(tmp_path, revision="no-such-commit")
    assert resolve_model_path(tmp_path) == tmp_path
    assert main(["convert", str(tmp_path), "--output", str(tmp_path / "out"), "--revision", "v2"]) == 2
    assert "leave out the revision v2" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
