"""An entry of a plug-in that is none is refused by name, with the reason, where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from json import JSONDecoder
from typing import Any, Literal

import pytest

from manyheads import catalogue
from manyheads.catalogue import KINDS, Architecture, Table, Task, load, made_by
from manyheads.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Named:
    architecture: Literal["a"] = "a"
    kind: Literal["a"] = "a"

    def score(self, num_heads: int, head_dim: int) -> None:
        """Dot products."""


@dataclass(frozen=True, kw_only=True)
class NamedOtherwise:
    architecture: Literal["b"] = "b"
    kind: Literal["b"] = "b"


@dataclass(frozen=True, kw_only=True)
class WithoutScore:
    kind: Literal["a"] = "a"


class Plain: ...


def fail() -> None:
    raise ValueError("no such luck")


def leave() -> None:
    raise SystemExit(5)


def refuse() -> None:
    raise DataError("There is no data.")


def architecture(config: Any, task: Any = "translation") -> Architecture:
    return Architecture(task, config, {}, lambda _: fail())


def given(kind: str, entry: Any, monkeypatch: pytest.MonkeyPatch) -> Table[Any]:
    """A table with one entry, `a` of the plug-in `shop`."""
    monkeypatch.setattr(catalogue, "_plugins", lambda: {kind: [("a", entry, "shop")]})
    return Table(kind, {})


@pytest.mark.parametrize(
    ("kind", "entry", "said"),
    [
        ("architecture", object(), "is <object object at .*; it must be a catalogue.Architecture."),
        ("architecture", architecture(Named, "speech"), "is for the task 'speech'; it must be one of translation, "),
        ("architecture", architecture("json:NOPE"), "cannot be imported from .*module 'json' has no attribute 'NOPE'"),
        ("architecture", architecture(Plain), "it must be a dataclass with a field architecture"),
        ("architecture", architecture(NamedOtherwise), "whose field architecture is 'b'; both names must be the same"),
        ("architecture", "json", "cannot be imported from json: AttributeError"),
        ("score", 3, "has the config 3; it must be a dataclass with a field kind"),
        ("score", Plain, "it must be a dataclass with a field kind"),
        ("score", NamedOtherwise, "whose field kind is 'b'"),
        ("score", WithoutScore, "has no method score"),
        ("task", 3, "is 3; it must be a catalogue.Task."),
        ("task", Task("none", (), "speech"), "is for models of 'speech'; they must be of translation, "),  # type: ignore[arg-type]
        ("preset", 3, "is 3; it must be a function or a class."),
        ("logger", "math:pi", "is 3.14.*; it must be a function or a class."),
        ("peer", 3, "is 3; it must be a function or a class."),
        ("format", 3, "is 3; it must be an extras.exports.Format."),
        ("format", "manyheads.extras.exports:EXPORTS", "it must be an extras.exports.Format."),
        ("logger", f"{__name__}:nothing_here", "cannot be imported from .*:nothing_here: AttributeError"),
    ],
)
def test_what_is_no_entry(kind: str, entry: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = given(kind, entry, monkeypatch)
    for _ in range(2):  # and again, when the plug-ins have been read
        with pytest.raises(ConfigError, match=f"^the {kind} a of the plug-in shop .*{said}"):
            table["a"]
    assert list(table) == []
    assert "a" in table


def test_a_module_that_ends_the_program_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "load", lambda reference: leave())
    with pytest.raises(ConfigError, match=r"cannot be imported from shop:A: SystemExit: 5$"):
        given("logger", "shop:A", monkeypatch)["a"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_an_entry(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    format_named_a = type("Format", (), {"name": "a", "architectures": ()})()
    entries = {
        "architecture": architecture(Named),
        "score": Named,
        "task": Task("none", (), "translation"),
        "format": format_named_a,
    }
    entry = entries.get(kind, fail)
    table = given(kind, entry, monkeypatch)
    assert table["a"] is entry
    assert list(table) == ["a"]


def test_a_dotted_path_names_what_a_colon_names() -> None:
    assert load("json:JSONDecoder") is load("json.JSONDecoder") is load(JSONDecoder) is JSONDecoder


def test_a_function_of_a_plugin_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the preset a of the plug-in shop fails: ValueError: no such luck"):
        made_by(given("preset", fail, monkeypatch), "a")
    with pytest.raises(DataError, match="There is no data"):
        made_by(given("preset", refuse, monkeypatch), "a")
    with pytest.raises(ValueError, match="no such luck"):  # a mistake of this package stays one
        made_by(Table("preset", {"b": fail}), "b")
