"""A model folder records the languages that it translates, and its card names them."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from manyheads.catalogue import build_model
from manyheads.cli.records import describe_folder
from manyheads.errors import ModelFileError
from manyheads.models.pretrained import load, read_languages, save_pretrained
from manyheads.models.transformer import config as presets

CONFIG = dataclasses.replace(presets.PRESETS["debug"], source_vocab_size=11, target_vocab_size=11)


def test_languages_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_pretrained(build_model(CONFIG), folder, languages=[("en", "de"), ("de", "en")])
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["languages"] == [["en", "de"], ["de", "en"]]
    assert read_languages(folder) == (("en", "de"), ("de", "en"))
    load(folder)
    card = (folder / "README.md").read_text("utf-8")
    assert card.startswith("---\nlanguage: [en, de]\n")
    assert "It translates from en to de, de to en." in card
    record = describe_folder(folder)
    assert record["languages"] == ["en > de", "de > en"]
    assert "languages" not in record["config"]


def test_norwegian_is_not_false(tmp_path: Path) -> None:
    """YAML reads `no` without quotes as a truth value, and the hub would refuse the card."""
    save_pretrained(build_model(CONFIG), tmp_path / "model", languages=[("en", "no")])
    head = (tmp_path / "model" / "README.md").read_text("utf-8").split("---\n")[1]
    assert yaml.safe_load(head)["language"] == ["en", "no"]


def test_without_languages_the_folder_is_as_before(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_pretrained(build_model(CONFIG), folder)
    assert "languages" not in json.loads((folder / "config.json").read_text("utf-8"))
    assert (folder / "README.md").read_text("utf-8").startswith("---\nlibrary_name: manyheads\n")
    assert read_languages(folder) == ()


@pytest.mark.parametrize("languages", ["en", [["en"]], [["en", 1]], {"en": "de"}])
def test_damaged_languages(languages: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"languages": languages}), encoding="utf-8")
    with pytest.raises(ModelFileError, match="languages must be a list of pairs"):
        read_languages(tmp_path)
