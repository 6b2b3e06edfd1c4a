"""The public names and signatures are those of release/public-api.txt."""

import importlib

import pytest
from public_api import HOW, differences, names


def test_public_names_and_signatures_are_as_recorded() -> None:
    pytest.importorskip("griffe", reason="griffelib is not installed")
    found = differences()
    assert not found, "\n".join(["The public interface has changed:", *found, HOW])


def test_public_names_are_there() -> None:
    pytest.importorskip("griffe", reason="griffelib is not installed")
    for name in names():
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is not None
