"""No regular expression that reads texts of others takes more than linear time, whatever the text.

Patterns are found by themselves: those of modules, and those that calls of `re` have as a literal.
"""

import ast
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from manyheads.errors import MissingExtraError

PACKAGES = (
    "data",
    "text",
    *(f"extras.{name}" for name in ("documents", "serving", "sgm", "tables", "tmx", "cleaning")),
)
FRAGMENTS = (
    "a", "<a", "<a ", "<svg", "\"'", "<a '\"", " \t", "[^", "![", "&#", "a.", "a@", "-", "{{", "{%", "$", "%(", "(",
    "\n ", "class=",
    "[[", "0 ", "0-", "1.", "1:", "http://(", "http://.", "www.a", "+1 ", "/a", "C:\\", "e\u0301", "«", ". ",
    ".", "…", "。", ":a", "#", "_", "--a", "\r", "😊", "😊\u200d", "1\ufe0f", "00:", "-->", "|", "\\", "`", ",", "A",
)  # fmt: skip
SIZE, GROWTH, FACTOR, FLOOR = 500, 8, 30, 0.05  # a square grows 64 times

Find = Callable[[str], Any]


def modules() -> Iterator[Any]:
    for package in PACKAGES:
        root = importlib.import_module(f"manyheads.{package}")
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            try:
                yield importlib.import_module(found.name)
            except (ImportError, MissingExtraError):  # of an extra that is not installed
                continue


def patterns() -> dict[str, Find]:
    """Name -> what looks for the pattern in a text, as the code does: at every place, or only at the beginning."""
    found: dict[str, Find] = {}
    for module in modules():
        tree = ast.parse(Path(module.__file__).read_text("utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        for name, value in vars(module).items():
            some = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else [value]
            for number, one in enumerate(some):
                if isinstance(one, re.Pattern) and isinstance(one.pattern, str):
                    ways = {call.func.attr for call in calls if getattr(call.func.value, "id", "") == name}
                    found[f"{module.__name__}.{name}.{number}"] = _finder(one, ways)
        for call in calls:
            of_re = getattr(call.func.value, "id", "") == "re" and call.args and isinstance(call.args[0], ast.Constant)
            if of_re and isinstance(call.args[0].value, str) and call.func.attr not in ("compile", "escape"):
                pattern = re.compile(call.args[0].value, re.DOTALL)
                found[f"{module.__name__}:{call.args[0].value}"] = _finder(pattern, {call.func.attr})
    return found


def _finder(pattern: re.Pattern[str], ways: set[str]) -> Find:
    if ways and ways <= {"match", "fullmatch"}:
        return pattern.match
    return lambda text: sum(1 for _ in pattern.finditer(text))


PATTERNS = patterns()


def seconds(find: Find, text: str) -> float:
    start = process_time()
    find(text)
    return process_time() - start


def grows_in_proportion(find: Find) -> tuple[str, str] | None:
    """Return what a text is repeated of where the time grows faster than the text; None: nowhere."""
    for fragment in FRAGMENTS:
        for end in ("", "\0"):
            long = seconds(find, fragment * (SIZE * GROWTH) + end)
            if long > FLOOR and long > FACTOR * seconds(find, fragment * SIZE + end):
                return fragment, end
    return None


def test_patterns_are_found() -> None:
    found = {package for package in PACKAGES for name in PATTERNS if name.startswith(f"manyheads.{package}.")}
    assert found == set(PACKAGES)
    assert len(PATTERNS) > 80


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PATTERNS)
def test_time_grows_with_the_text(name: str) -> None:
    assert grows_in_proportion(PATTERNS[name]) is None


def test_a_pattern_that_takes_the_square_of_the_length_is_noticed() -> None:
    tag = re.compile(r"<(?P<name>[a-zA-Z][^\s/>]*)(?P<attributes>(?:[^<>\"']|\"[^\"]*\"|'[^']*')*)>")
    assert grows_in_proportion(_finder(tag, {"search"})) is not None
