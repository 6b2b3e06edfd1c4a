"""No regular expression of the readers of HTML and Markdown takes more than linear time, whatever the text."""

from __future__ import annotations

import re
from time import process_time

import pytest

from manyheads.documents import html, markdown, plain

PATTERNS = {
    f"{module.__name__}.{name}": value
    for module in (html, markdown, plain)
    for name, value in vars(module).items()
    if isinstance(value, re.Pattern)
}
FRAGMENTS = (
    "a",
    "<a",
    "<a ",
    "<svg",
    "\"'",
    "<a '\"",
    " \t",
    "[^",
    "![",
    "&#",
    "a.",
    "-",
    "{{",
    "$",
    "(",
    "\n ",
    "class=",
)
SIZE, GROWTH, FACTOR, FLOOR = 1_000, 8, 30, 0.05  # a square grows 64 times


def seconds(pattern: re.Pattern[str], text: str) -> float:
    start = process_time()
    for _ in [pattern.match(text)] if pattern is plain.ITEM else pattern.finditer(text):  # tried at a line's begin
        pass
    return process_time() - start


@pytest.mark.parametrize("name", PATTERNS)
def test_time_grows_with_the_text(name: str) -> None:
    pattern = PATTERNS[name]
    for fragment in FRAGMENTS:
        for begin, end in (("", ""), ("<", ""), ("", "\0")):
            long = seconds(pattern, begin + fragment * (SIZE * GROWTH) + end)
            short = seconds(pattern, begin + fragment * SIZE + end) if long > FLOOR else long
            assert long <= max(FLOOR, FACTOR * short), (fragment, begin, end)
