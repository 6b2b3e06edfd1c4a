"""Ranges of settings, and the names of the settings in an error."""

from __future__ import annotations

import ast
import copy
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

import manyheads
from manyheads.config.checks import ABOVE_ZERO, BELOW_ONE, FRACTION, POSITIVE_FRACTION, Range, at_least, between, check
from manyheads.errors import ConfigError


@dataclass
class Settings:
    rate: float | None = None


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (at_least(1), [1, 2, 10**300], [0, -1]),
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
    files = [*source.glob("architectures/*/config.py"), *source.rglob("*settings.py"), source / "evaluation/reading.py"]
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
