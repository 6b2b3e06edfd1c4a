"""Documents, and translations of them that need no model."""

from collections.abc import Callable, Sequence

import pytest

from manyheads.extras.documents.formats import read_document
from manyheads.extras.documents.parts import Part, Tag, Text

Change = Callable[[str], str]


def changed(parts: Sequence[Part], change: Change) -> list[Part]:
    """The parts with other text."""
    return [Text(change(part.text)) if isinstance(part, Text) else part for part in parts]


@pytest.fixture
def translated() -> Callable[..., str]:
    """Text, format and a function -> the document with every text changed by the function."""

    def translate(text: str, format_name: str, change: Change = str.upper, columns: Sequence[str] = ()) -> str:
        document = read_document(text, "file", format_name, columns)
        assert [text[one.start : one.end] for one in document.segments]
        result, kept = document.with_translations([changed(one.parts, change) for one in document.segments])
        assert not kept
        return result

    return translate


@pytest.fixture
def texts() -> Callable[..., list[str]]:
    """Text and format -> the text of each segment, with a tag as `<>`."""

    def read(text: str, format_name: str, columns: Sequence[str] = ()) -> list[str]:
        document = read_document(text, "file", format_name, columns)
        return [
            "".join("<>" if isinstance(part, Tag) else part.text for part in segment.parts)
            for segment in document.segments
        ]

    return read
