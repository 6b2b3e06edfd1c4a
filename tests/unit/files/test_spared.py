"""Outputs in folders whose manifests list their files."""

import json
from pathlib import Path

import pytest

from manyheads.errors import ConfigError
from manyheads.files.commit import write_folder
from manyheads.files.output_safety import check_spares_folders
from manyheads.files.verify import verify_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Of the form of a model folder."""

    def fill(folder: Path) -> None:
        (folder / "config.json").touch()
        (folder / "notes.txt").touch()

    write_folder(tmp_path / "model", fill)
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Of the form of prepared data."""
    folder = tmp_path / "data"
    folder.mkdir()
    manifest = {"format": "manyheads.prepared", "format_version": 2, "files": {"tokenizer.json": {}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "notes.txt", "new.md", "sub/new.json"])
def test_files_in_a_model_folder(model: Path, name: str) -> None:
    """One that its manifest lists, or one that makes it unusable."""
    with pytest.raises(ConfigError, match=r"choose another place\.$") as refused:
        check_spares_folders(model / name)
    assert str(model) in str(refused.value)
    link = model.with_name("link")
    link.symlink_to(model / name)
    with pytest.raises(ConfigError, match="choose another place"):
        check_spares_folders(link)


@pytest.mark.parametrize("name", ["new.txt", "heads.png", ".hidden/x.json", "../beside.json"])
def test_files_that_harm_no_model(model: Path, name: str) -> None:
    check_spares_folders(model / name)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).touch()
    verify_folder(model, strict=False)


def test_folders_in_a_model_folder(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"sub would be in .*model, which would then be refused as damaged"):
        check_spares_folders(model / "sub", is_folder=True)
    check_spares_folders(model.with_name("sub"), is_folder=True)
    check_spares_folders(model, is_folder=True)  # the folder itself is another matter: it may be replaced


def test_prepared_data(data: Path) -> None:
    for name in ("tokenizer.json", "new.json", "new.txt"):
        with pytest.raises(ConfigError, match="choose another place"):
            check_spares_folders(data / name)
    check_spares_folders(data / "new.md")
    check_spares_folders(data / "runs", is_folder=True)


def test_other_manifests_and_other_paths(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "of a web page"}')
    check_spares_folders(tmp_path / "new.json")
    check_spares_folders(tmp_path / "a\0b")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    check_spares_folders(tmp_path / "circle")
