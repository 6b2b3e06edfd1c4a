"""What there is to set, read from the settings' own docstrings."""

from dataclasses import dataclass

import pytest

from manyheads.catalogue import PRESETS, RUNS
from manyheads.config.build import resolve
from manyheads.config.files import dotted_names, from_dotted
from manyheads.config.options import argument_docs, describe, show_value
from manyheads.training.settings import RunConfig


@dataclass(frozen=True)
class Small:
    """A class.

    Paper: none, 2026: really.

    Args:
        first: one line.
        second: a line that
            goes on: with a colon.

    Raises: ConfigError: never.
    """

    first: int
    second: float | None = None


def test_entries_of_a_docstring() -> None:
    assert argument_docs(Small) == {"first": "one line.", "second": "a line that goes on: with a colon."}


def test_a_setting_without_a_default() -> None:
    first, second = describe(Small)
    assert (first.path, first.kind, first.default) == ("first", "INT", "")
    assert (second.path, second.kind, second.default) == ("second", "FLOAT|null", "null")


@pytest.mark.parametrize("run", RUNS.values())
def test_every_setting_of_a_run_is_told_in_words(run: type[RunConfig]) -> None:
    settings = list(describe(run))
    names = set(dotted_names(run))
    sections = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    sections -= {"model.attention"}  # `kind` of a choice is the value of its section
    paths = [setting.path for setting in settings]
    assert len(paths) == len(set(paths))
    assert set(paths) == names - sections - {"model.attention.kind"}
    assert not [setting.path for setting in settings if not setting.help]
    assert not [setting.path for setting in settings if "Args:" in setting.help or "Raises" in setting.help]


def test_the_defaults_shown_can_be_typed() -> None:
    for make in PRESETS.values():
        config = make()
        typed = {
            setting.path: setting.default
            for setting in describe(type(config), config)
            if setting.path != "model.attention.hidden_dim"
            and not any(setting.help.startswith(f"({other}) ") for other in RUNS if other != config.model.architecture)
        }
        assert resolve(type(config), [from_dotted([type(config)], typed)]) == config


def test_values_as_they_are_typed() -> None:
    shown = [show_value(value) for value in (None, True, 1e-9, 3, (1, 2), (), "a")]
    assert shown == ["null", "true", "1e-09", "3", "[1, 2]", "[]", "a"]
