"""Documents that would take minutes if the work grew with the square of their size."""

from __future__ import annotations

import pytest

from manyheads.documents.formats import read_document
from manyheads.documents.parts import Text
from manyheads.documents.sentences import protected

pytest.importorskip("markdown_it")
SIZE = 40_000


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("html", "<a " * SIZE),
        ("html", '<a "' * SIZE),
        ("html", "<!--" * SIZE),
        ("html", "<code>" * SIZE),
        ("html", "<p>a</p>" * SIZE),
        ("text", "a\n" * SIZE),
        ("text", "a " * SIZE),
        ("srt", "00:00:01,000 --> 00:00:02,000\na\n\n" * (SIZE // 10)),
        ("srt", "00:00:01,000 --> 00:00:02,000\n" + "{" * SIZE),
        ("markdown", "a\n\n" * (SIZE // 20)),
        ("markdown", "$a " * (SIZE // 20)),
    ],
)
def test_reading(format_name: str, text: str) -> None:
    document = read_document(text, "file", format_name)
    lines = [document.line_of(segment) for segment in document.segments]
    assert lines == sorted(lines)
    assert document.with_translations([[Text("b")] for _ in document.segments])[0]


@pytest.mark.parametrize("text", ["a." * SIZE, "a_" * SIZE, "{" * SIZE, "%" * SIZE, "http://" * SIZE, "www." * SIZE])
def test_protecting(text: str) -> None:
    assert "".join(part.text if isinstance(part, Text) else part.code for part in protected([Text(text)])) == text


def test_columns() -> None:
    rows = "id,text\n" + "1,a text\n" * SIZE
    document = read_document(rows, "file", "csv", ["text"])
    assert document.line_of(document.segments[-1]) == SIZE + 1
    records = '{"a": {"b": "a text"}}\n' * SIZE
    assert len(read_document(records, "file", "jsonl", ["a.b"]).segments) == SIZE
