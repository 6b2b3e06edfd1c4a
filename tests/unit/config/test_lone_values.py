"""A single text or number in place of a list is one item, never its letters: in every settings class."""

import importlib
import inspect
import json
import pkgutil
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import manyheads
from manyheads.config.build import build, convert
from manyheads.config.files import field_types
from manyheads.decoding.settings import GenerationSettings, read_settings
from manyheads.errors import ConfigError

PACKAGES = ("data", "decoding", "extras.serving", "models", "text", "training")


def tuple_fields() -> list[tuple[type, str, Any]]:
    """All fields of settings and configs whose type is a tuple of any length."""
    found: dict[tuple[str, str], tuple[type, str, Any]] = {}
    for package in PACKAGES:
        path = Path(manyheads.__file__).parent.joinpath(*package.split("."))
        for module in pkgutil.walk_packages([str(path)], f"manyheads.{package}."):
            if not module.name.endswith(("settings", "config")):
                continue
            for name, cls in vars(importlib.import_module(module.name)).items():
                if inspect.isclass(cls) and is_dataclass(cls) and name.endswith(("Settings", "Config")):
                    for field, kind in field_types(cls).items():
                        if get_origin(kind) is tuple and get_args(kind)[1:] == (...,):
                            found[name, field] = (cls, field, kind)
    return list(found.values())


def lone(kind: Any) -> Any:
    item = get_args(kind)[0]
    return get_args(item)[0] if get_args(item) else {str: "END", int: 4, bool: True, float: 0.5}.get(item)


def test_every_tuple_takes_a_single_item() -> None:
    names = set()
    for cls, name, kind in tuple_fields():
        value = lone(kind)
        if value is None:
            continue
        names.add((cls.__name__, name))
        assert convert(kind, value, name) == (value,), (cls, name)
        assert convert(kind, [value, value], name) == (value, value), (cls, name)
    assert {("GenerationSettings", "stop"), ("SegmentSettings", "mix"), ("TrainingSettings", "freeze")} <= names
    assert {("ServingSettings", "models"), ("TransformerXLConfig", "cutoffs"), ("ReformerConfig", "layers")} <= names


def test_classes_that_are_made_directly_hold_tuples() -> None:
    """A wrong value may be refused, but its letters are never taken for items."""
    held, required = set(), {"vocab_size": 50, "source_vocab_size": 50, "target_vocab_size": 50}
    for cls, name, kind in tuple_fields():
        if get_args(kind)[0] is not str:
            continue
        needed = {field: value for field, value in required.items() if field in field_types(cls)}
        for given in ("END", ["END"], ("END",)):
            with suppress(ConfigError):  # "END" may be no value of this field; its letters would be other errors
                assert getattr(cls(**needed, **{name: given}), name) == ("END",), (cls, name, given)
                held.add((cls.__name__, name))
    assert {("GenerationSettings", "stop"), ("TrainingSettings", "freeze"), ("ServingSettings", "models")} <= held


def test_stop_texts_and_banned_ids(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop": "\n", "banned_ids": 7}), encoding="utf-8")
    assert read_settings(tmp_path, GenerationSettings) == GenerationSettings(stop=("\n",), banned_ids=(7,))
    assert GenerationSettings(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert build(GenerationSettings, {"banned_ids": "7"}).banned_ids == (7,)
    for values, reason in (({"stop": ""}, "empty text"), ({"stop": 3}, "stop is 3;"), ({"banned_ids": "x"}, "is 'x';")):
        with pytest.raises(ConfigError, match=reason):
            build(GenerationSettings, values)
