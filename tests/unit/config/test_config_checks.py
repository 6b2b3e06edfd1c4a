"""Ranges of settings, and the names of the settings in an error."""

import ast
import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import manyheads
from manyheads.catalogue import RUNS
from manyheads.config.build import build
from manyheads.config.checks import ABOVE_ZERO, BELOW_ONE, FRACTION, POSITIVE_FRACTION, Range, at_least, between, check
from manyheads.config.files import field_types, tag_of, variants
from manyheads.errors import ConfigError
from manyheads.training.settings import RunConfig


@dataclass
class Settings:
    rate: float | None = None


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (at_least(1), [1, 2, 2**53, 1e300], [0, -1]),
        (between(2, 5), [2, 5], [1, 6]),
        (ABOVE_ZERO, [1e-300], [0, -1.0]),
        (BELOW_ONE, [0, 0.999], [1, -1e-9]),
        (FRACTION, [0, 1], [1.001, -0.001]),
        (POSITIVE_FRACTION, [1e-9, 1], [0, 1.001]),
    ],
)
def test_ranges(allowed: Range, inside: list[float], outside: list[float]) -> None:
    for value in (*inside, None):
        check(Settings(value), "model.", allowed, "rate")
    for value in (*outside, math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError) as caught:
            check(Settings(value), "model.", allowed, "rate", hint=" (so it is)")
        wanted = allowed.wanted if value != math.inf or allowed.high < math.inf else f"a finite number {allowed.wanted}"
        assert str(caught.value) == f"model.rate is {value}; it must be {wanted} (so it is)."
        assert caught.value.fields == ("rate",)


def test_fields_survive_a_copy() -> None:
    error = copy.copy(ConfigError("text", fields=["a", "b"]))
    assert (str(error), error.fields) == ("text", ("a", "b"))


def test_settings_name_the_fields_of_their_errors() -> None:
    """Without them `config.build` could not find the line of a mistake, nor any mistake after the first."""
    source = Path(manyheads.__file__).parent
    files = [*source.glob("models/*/config.py"), *source.rglob("*settings.py"), source / "evaluation/reading.py"]
    seen = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (
                isinstance(node, ast.ClassDef) and any(getattr(x, "name", "") == "__post_init__" for x in node.body)
            ):
                continue
            checks = [
                x for x in node.body if isinstance(x, ast.FunctionDef) and x.name.startswith(("__post", "_check"))
            ]
            raised = [x.exc for one in checks for x in ast.walk(one) if isinstance(x, ast.Raise)]
            for call in raised:
                assert isinstance(call, ast.Call)
                assert "fields" in [word.arg for word in call.keywords], f"{file}:{call.lineno}"
                seen += 1
    assert seen > 30


NO_RANGE = {"seed", "decoding.seed", "generation.seed"}
"""Any whole number is right."""


def whole_numbers(cls: type, prefix: str = "") -> dict[str, dict[str, object]]:
    """Dotted name of every integer setting -> what else must be given for it to exist: the kind of a choice."""
    found: dict[str, dict[str, object]] = {}
    for name, annotation in field_types(cls).items():
        path, classes = f"{prefix}{name}", variants(annotation)
        for inner in classes:
            chosen: dict[str, object] = {}
            if len(classes) > 1:
                tag, kinds = tag_of(classes)
                chosen = {f"{path}.{tag}": next(word for word, kind in kinds.items() if kind is inner)}
            found |= {key: chosen | more for key, more in whole_numbers(inner, f"{path}.").items()}
        is_list = any(get_origin(part) is tuple for part in (annotation, *get_args(annotation)))
        if not classes and not is_list and int in (annotation, *get_args(annotation)):
            found[path] = {}
    return found


def nested(values: dict[str, object]) -> dict[str, Any]:
    """Dotted names as sections."""
    result: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return result


@pytest.mark.parametrize("kind", [*RUNS])
def test_every_whole_number_has_a_range(kind: str) -> None:
    """2**63 is in none, and the message says which numbers are."""
    wrong = {}
    numbers = whole_numbers(RUNS[kind])
    for path, chosen in numbers.items():
        with pytest.raises(ConfigError, match="it must be from -18,446,744,073,709,551,616"):
            build(RUNS[kind], nested({**chosen, path: 2**65}))
        try:
            build(RUNS[kind], nested({**chosen, path: 2**63}))
        except ConfigError as error:
            wrong |= {} if "must be" in str(error) else {path: str(error)}
        else:
            wrong |= {} if path in NO_RANGE else {path: "is accepted"}
    assert wrong == {}
    assert len(numbers) > 25


def test_more_threads_than_any_machine_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads is 100000; it must be"):
        RunConfig(num_threads=100_000)
